"""A service dies at each moment at which a request changes hands: nothing is lost or repeated."""

import asyncio
import time
from random import Random

import pytest
import pytest_asyncio

from tests.chaos.checker import final_faults
from tests.chaos.cluster import ROUTERS, Cluster, Shape
from tests.chaos.dying import MOMENTS
from tests.chaos.load import Client
from tests.chaos.tally import Tally
from tests.chaos.wanted import draw
from tests.headrace.waiting import until

pytestmark = [
    pytest.mark.system,
    # Much of this is in test_windows.py, too, one moment at a time.
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

PATIENCE_S = 90.0


class Dying:
    """A cluster whose services die when told, and are started again."""

    def __init__(self, cluster: Cluster, file) -> None:
        self.cluster = cluster
        self.file = file
        self.ended = {}
        self.num_clients = 0

    def client(self, tally: Tally) -> Client:
        self.num_clients += 1
        name = f"c{self.num_clients}"
        addresses = {router: self.cluster.address(router) for router in ROUTERS}
        return Client(name, addresses, Random(name), tally, self.ended)

    async def keep_running(self) -> None:
        """Starts services that died, until cancelled."""
        while True:
            for service in self.cluster.services.values():
                if not service.is_running:
                    await service.start()
            await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def dying(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moments")
    file = folder / "moment"
    shape = Shape(wrapper=("tests.chaos.dying", str(file)), step_ms=10.0)
    async with Cluster(shape, folder) as cluster:
        await cluster.until_ready()
        dying = Dying(cluster, file)
        keeping = asyncio.create_task(dying.keep_running())
        yield dying
        keeping.cancel()
        await asyncio.wait([keeping])
        assert not await final_faults(
            cluster, dying.ended, is_store_exact=True, patience_s=PATIENCE_S
        )


def does_at(moment: str) -> frozenset[str]:
    """What clients do, so that the moment comes."""
    if "abort" in moment:
        return frozenset({"abort"})
    if "resum" in moment or "taken over" in moment:
        return frozenset({"leave", "rival"})
    return frozenset({"read", "leave"})


@pytest.mark.parametrize("moment", [name for name in MOMENTS if "recover" not in name])
async def test_a_death_at_this_moment_loses_and_repeats_nothing(dying, moment):
    tally, does = Tally(), does_at(moment)
    dying.file.write_text(moment)
    began = time.monotonic()

    def is_over() -> bool:
        return not dying.file.exists() or time.monotonic() - began > PATIENCE_S

    clients = [dying.client(tally) for _ in range(3)]
    await asyncio.gather(
        *(c.run(lambda rng, name: draw(rng, name, does), is_over) for c in clients)
    )
    assert not dying.file.exists(), "the moment did not come"
    assert not tally.violations


@pytest.mark.parametrize("moment", [name for name in MOMENTS if "recover" in name])
async def test_a_death_while_what_a_power_cut_left_is_recovered_loses_nothing(dying, moment):
    tally, died = Tally(), asyncio.Event()
    clients = [dying.client(tally) for _ in range(3)]
    for client in clients:
        client.comes_back = died
    serving = [
        asyncio.create_task(
            client.run(lambda rng, name: draw(rng, name, frozenset({"leave"})), died.is_set)
        )
        for client in clients
    ]
    await until(lambda: all(client.is_away for client in clients), PATIENCE_S)
    dying.file.write_text(moment)
    await asyncio.gather(*(service.kill() for service in dying.cluster.services.values()))
    await until(lambda: not dying.file.exists(), PATIENCE_S)
    died.set()
    await asyncio.gather(*serving)
    assert not tally.violations
