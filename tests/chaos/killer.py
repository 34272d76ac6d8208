"""The seeded killer: kills, stops, replaces and cuts off, and brings everything back."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from random import Random

from tests.chaos.cluster import Cluster, Service, kind_of
from tests.chaos.tally import Tally

_DRAIN_PATIENCE_S = 40.0
# How often each disturbance is drawn.
WEIGHTS = {
    "kill_router": 20,
    "kill_scheduler": 18,
    "kill_worker": 22,
    "kill_store": 4,
    "kill_two": 6,
    "power_cut": 1,
    "stop": 8,
    "replace": 4,
    "drain": 5,
    "reset": 8,
    "blackhole": 5,
    "refuse": 4,
}


class Killer:
    """Disturbs the cluster at random times; the same seed draws the same disturbances.

    At most two services are down at once, but for a power cut. A service that dies without having
    been killed is a violation.
    """

    def __init__(
        self, cluster: Cluster, rng: Random, tally: Tally, weights: dict[str, int]
    ) -> None:
        self._cluster = cluster
        self._rng = rng
        self._tally = tally
        self._weights = weights
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, interval_s: float, is_over: Callable[[], bool]) -> None:
        """Disturbs until told that it is over, then heals."""
        while not is_over():
            await asyncio.sleep(self._rng.expovariate(1 / interval_s))
            self._look()
            if len(self._tasks) < 3:
                (what,) = self._rng.choices(list(self._weights), list(self._weights.values()))
                self._begin(getattr(self, f"_{what}"))
        await self.heal()

    async def heal(self) -> None:
        """Waits until everything that was disturbed is back."""
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)
        self._look()

    def _begin(self, disturb: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            await disturb()

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tally.violation(f"a disturbance failed: {error!r}")

    def _look(self) -> None:
        """Looks for services that died by themselves."""
        for service in self._cluster.services.values():
            if not service.is_running and service.name not in self._busy:
                assert service.process is not None
                self._tally.violation(f"{service.name} ended: {service.process.returncode}")
                self._busy.add(service.name)
                self._begin(lambda service=service: self._restart(service))  # type: ignore[misc]

    def _pick(self, count: int = 1, kind: str = "") -> list[Service]:
        """Services that nobody disturbs now, which the caller gives back."""
        services = self._cluster.services.values()
        idle = [s for s in services if s.name not in self._busy and kind in kind_of(s.name)]
        found = self._rng.sample(idle, min(count, len(idle)))
        self._busy.update(service.name for service in found)
        return found

    async def _restart(self, service: Service) -> None:
        try:
            await service.start()
        finally:
            self._busy.discard(service.name)

    async def _kill_router(self) -> None:
        await self._kill(self._pick(kind="router"))

    async def _kill_scheduler(self) -> None:
        await self._kill(self._pick(kind="scheduler"))

    async def _kill_worker(self) -> None:
        await self._kill(self._pick(kind="worker"))

    async def _kill_two(self) -> None:
        await self._kill(self._pick(2))

    async def _kill(self, services: Sequence[Service]) -> None:
        delay_s = self._rng.choice((0.0, 0.0, 0.3, 1.5))
        for service in services:
            self._tally.disturbed(f"SIGKILL {kind_of(service.name)}")
        await asyncio.gather(*(service.kill() for service in services))
        await asyncio.sleep(delay_s)
        await asyncio.gather(*(self._restart(service) for service in services))

    async def _power_cut(self) -> None:
        """Everything dies at once, the store too."""
        if "store" in self._busy:
            return
        self._busy.add("store")
        services = self._pick(len(self._cluster.services))
        nodes = self._cluster.store.nodes
        for service in services:
            self._tally.disturbed(f"SIGKILL {kind_of(service.name)}")
        self._tally.kills["power cuts"] += 1
        for _ in nodes:
            self._tally.disturbed("SIGKILL store")
        with self._tally.store_away():
            await asyncio.gather(*(dying.kill() for dying in (*services, *nodes)))
            await asyncio.gather(*(node.start() for node in nodes))
        self._busy.discard("store")
        await asyncio.gather(*(self._restart(service) for service in services))

    async def _kill_store(self) -> None:
        if "store" in self._busy:
            return
        self._busy.add("store")
        try:
            await self._kill_node()
        finally:
            self._busy.discard("store")

    async def _kill_node(self) -> None:
        if not await self._cluster.store.may_lose_a_node():
            return
        node = self._rng.choice(self._cluster.store.nodes)
        delay_s = self._rng.choice((0.0, 0.5, 2.0, 4.0))
        self._tally.disturbed("SIGKILL store")
        self._tally.kills["store masters"] += node in await self._cluster.store.masters()
        with self._tally.store_away():
            await node.kill()
            await asyncio.sleep(delay_s)
            await node.start()

    async def _stop(self) -> None:
        """A process that hangs and goes on, sometimes after it was given up."""
        for service in self._pick():
            stop_s = self._rng.choice((0.3, 1.0, 2.0, 6.0))
            self._tally.disturbed(f"SIGSTOP {kind_of(service.name)}")
            service.signal(signal.SIGSTOP)
            await asyncio.sleep(stop_s)
            service.signal(signal.SIGCONT)
            self._busy.discard(service.name)

    async def _replace(self) -> None:
        """A second process of a name while the first hangs; the first goes on, then dies."""
        for service in self._pick():
            after_s, until_s = self._rng.uniform(0, 2), self._rng.uniform(0.5, 3)
            self._tally.disturbed(f"replace {kind_of(service.name)}")
            try:
                old = await service.replace()
                await asyncio.sleep(after_s)
                old.send_signal(signal.SIGCONT)
                await asyncio.sleep(until_s)
                await service.bury(old)
            finally:
                self._busy.discard(service.name)

    async def _drain(self) -> None:
        """SIGTERM: the process ends well by itself."""
        for service in self._pick():
            process = service.process
            assert process is not None
            self._tally.disturbed(f"SIGTERM {kind_of(service.name)}")
            service.signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_DRAIN_PATIENCE_S):
                    code = await process.wait()
                if code:
                    self._tally.violation(f"{service.name} was told to stop and ended with {code}")
            except TimeoutError:
                self._tally.violation(f"{service.name} was told to stop and does not")
                await service.kill()
            await self._restart(service)

    async def _reset(self) -> None:
        """Breaks the connections of one link."""
        proxy = self._rng.choice(self._rng.choice(list(self._cluster.links.values())))
        near, far = proxy.name.split("-")
        self._tally.disturbed(f"reset {kind_of(near)}-{kind_of(far)}")
        with self._tally.store_away() if far == "store" else contextlib.nullcontext():
            proxy.reset()

    async def _refuse(self) -> None:
        """A link between a router and a scheduler that breaks and stays down for some time."""
        proxy = self._rng.choice(self._cluster.links["router-scheduler"])
        if proxy.is_refusing:
            return
        self._tally.disturbed("refuse router-scheduler")
        proxy.is_refusing = True
        proxy.reset()
        await asyncio.sleep(self._rng.uniform(1, 5))
        proxy.is_refusing = False

    async def _blackhole(self) -> None:
        """A link whose connections stay open and carry nothing, sometimes broken at the end."""
        proxy = self._rng.choice(self._rng.choice(list(self._cluster.links.values())))
        cut_s, is_broken = self._rng.choice((0.3, 1.0, 3.0, 6.0)), self._rng.random() < 0.3
        near, far = proxy.name.split("-")
        self._tally.disturbed(f"cut {kind_of(near)}-{kind_of(far)}")
        with self._tally.store_away() if far == "store" else contextlib.nullcontext():
            proxy.set_blackhole(True)
            await asyncio.sleep(cut_s)
            proxy.set_blackhole(False)
            if is_broken:
                proxy.reset()
