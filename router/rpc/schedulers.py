"""The links to all schedulers, while schedulers come and go."""

import asyncio
from collections.abc import Callable, Iterator

import grpc.aio

from headrace.service.peers import PeerSource
from router.rpc.scheduler_client import SchedulerClient


class Schedulers:
    """One link for each scheduler that a source names."""

    def __init__(
        self,
        source: PeerSource,
        open_channel: Callable[[str], grpc.aio.Channel],
        make_client: Callable[[str, grpc.aio.Channel], SchedulerClient],
    ) -> None:
        """make_client: the client of an address and its channel."""
        self._source = source
        self._open_channel = open_channel
        self._make_client = make_client
        self._clients: dict[str, SchedulerClient] = {}

    def __iter__(self) -> Iterator[SchedulerClient]:
        return iter(list(self._clients.values()))

    async def run(self) -> None:
        """Keep up the links until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            async for peers in self._source.changes():
                is_leaving = {peer.address: peer.is_leaving for peer in peers}
                for address in sorted(is_leaving.keys() - self._clients.keys()):
                    if not is_leaving[address]:
                        channel = self._open_channel(address)
                        self._clients[address] = self._make_client(address, channel)
                        tasks.create_task(self._keep(address, channel))
                for address, client in self._clients.items():
                    client.expect(
                        is_leaving=is_leaving.get(address, True),
                        is_gone=address not in is_leaving,
                    )

    async def _keep(self, address: str, channel: grpc.aio.Channel) -> None:
        try:
            await self._clients[address].run()
        finally:
            del self._clients[address]
            await channel.close()
