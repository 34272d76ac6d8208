"""A source of peers whose set a test changes."""

import asyncio
from collections.abc import AsyncIterator, Iterable

from headrace.service.peers import Peer


class ChangingPeers:
    """Yields what `set` is given."""

    def __init__(self, addresses: Iterable[str] = ()) -> None:
        self._sets: asyncio.Queue[frozenset[Peer]] = asyncio.Queue()
        self.set(addresses)

    def set(self, addresses: Iterable[str], leaving: Iterable[str] = ()) -> None:
        peers = {Peer(address, address) for address in addresses}
        peers |= {Peer(address, address, is_leaving=True) for address in leaving}
        self._sets.put_nowait(frozenset(peers))

    async def changes(self) -> AsyncIterator[frozenset[Peer]]:
        while True:
            yield await self._sets.get()
