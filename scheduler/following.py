"""Which workers a scheduler drives, when it owns all the workers that it finds."""

from collections.abc import Callable
from typing import Protocol

from headrace.service.peers import PeerSource
from scheduler.pool import Pool
from scheduler.worker import WorkerConnector


class Share(Protocol):
    """This scheduler's share of the workers: which of them it drives."""

    async def run(self) -> None:
        """Tell the pool which workers to drive, as long as that may change."""
        ...

    def drain(self) -> None:
        """Take no other worker, and give up each worker when it has no request."""
        ...

    async def release(self) -> None:
        """Give up all workers."""
        ...


class AllWorkers:
    """The share of a scheduler that owns every worker of a source."""

    def __init__(
        self, source: PeerSource, pool: Pool, connect: Callable[[str], WorkerConnector]
    ) -> None:
        self._source = source
        self._pool = pool
        self._connect = connect

    async def run(self) -> None:
        """Drive the workers of the source, except those that leave, until the source ends."""
        driven: set[str] = set()
        async for peers in self._source.changes():
            wanted = {peer.address for peer in peers if not peer.is_leaving}
            for address in sorted(wanted - driven):
                self._pool.add(address, self._connect(address))
            for address in driven - wanted:
                self._pool.retire(address)
            driven = wanted

    def drain(self) -> None:
        """Nothing: no other scheduler waits for these workers."""

    async def release(self) -> None:
        """Nothing; see drain."""
