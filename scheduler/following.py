"""Which workers a scheduler drives, when it owns all the workers that it finds."""

from collections.abc import Callable

from headrace.service.peers import PeerSource
from scheduler.pool import Pool
from scheduler.worker import WorkerConnector


async def follow(source: PeerSource, pool: Pool, connect: Callable[[str], WorkerConnector]) -> None:
    """Drive the workers of a source, except those that leave, until the source ends."""
    driven: set[str] = set()
    async for peers in source.changes():
        wanted = {peer.address for peer in peers if not peer.is_leaving}
        for address in sorted(wanted - driven):
            pool.add(address, connect(address))
        for address in driven - wanted:
            pool.retire(address)
        driven = wanted
