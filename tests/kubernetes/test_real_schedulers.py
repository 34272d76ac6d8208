"""Scheduler processes that own worker processes by leases, while they are stopped and killed."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from headrace.v1 import common_pb2, scheduler_pb2
from tests.chaos import stub_model
from tests.kubernetes.cluster import WORKERS, Namespace
from tests.kubernetes.control_plane import ControlPlane
from tests.scheduler.harness import FakeRouter

pytestmark = pytest.mark.system

PROMPT = [11, 12, 13, 14, 15]
LONG, SHORT = 400, 5
READY, DRAINING = common_pb2.WORKER_STATE_READY, common_pb2.WORKER_STATE_DRAINING


class Service:
    """A process, and what it has logged."""

    def __init__(self, process: Process, file: Path) -> None:
        self.process = process
        self._file = file
        self.log = ""
        self._reading = asyncio.create_task(self._read())

    async def address(self) -> str:
        async with asyncio.timeout(60):
            while not self._file.exists():
                assert self.process.returncode is None, self.log
                await asyncio.sleep(0.02)
        return self._file.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def until_logged(self, text: str) -> None:
        try:
            async with asyncio.timeout(60):
                while text not in self.log:  # noqa: ASYNC110 a log has no event
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"it does not say {text!r}:\n{self.log[-3000:]}") from None

    async def _read(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log += line.decode()

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading


@asynccontextmanager
async def service(module: str, file: Path, *flags: str) -> AsyncIterator[Service]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--listen", "127.0.0.1:0"),
        *("--address-file", str(file), *flags),
        env=os.environ | {"HEADRACE_PARENT_DEATH": "1"},
        stderr=asyncio.subprocess.PIPE,
    )
    started = Service(process, file)
    try:
        yield started
    finally:
        await started.end()


class Cluster:
    """Workers with pods, and schedulers that share them."""

    def __init__(self, namespace: Namespace, folder: Path, stack: AsyncExitStack) -> None:
        self.namespace = namespace
        self._folder = folder
        self._stack = stack
        self._kubeconfig = namespace.kubeconfig()

    async def worker(self, name: str, *flags: str) -> Service:
        files = ("--counts-file", str(self._folder / f"{name}.counts"))
        started = await self._stack.enter_async_context(
            service(
                "tests.chaos.stub_worker", self._folder / name, "--worker-id", name, *files, *flags
            )
        )
        self.namespace.add_pod(name, await started.address())
        return started

    async def scheduler(self, name: str, *flags: str) -> Service:
        return await self._stack.enter_async_context(
            service(
                *("scheduler", self._folder / name, "--scheduler-id", name),
                *("--discovery-type", "kubernetes", "--worker-selector", WORKERS),
                *("--discovery-kubeconfig", str(self._kubeconfig), "--discovery-interval-s", "2"),
                *("--ownership-lease-duration-s", "4", "--ownership-renew-every-s", "0.5"),
                *("--ownership-rebalance-after-s", "600", *flags),
            )
        )

    async def router(self, scheduler: Service, name: str = "r0") -> FakeRouter:
        router = FakeRouter(await scheduler.address(), name)
        reading = asyncio.create_task(router.read())
        self._stack.push_async_callback(asyncio.wait, [reading])
        self._stack.push_async_callback(router.close)
        await router.send(hello=scheduler_pb2.Hello(router_id=name))
        return router


@pytest.fixture
async def cluster(control_plane: ControlPlane, tmp_path: Path) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(Namespace(control_plane), tmp_path, stack)


async def submit(router: FakeRouter, num_tokens: int, **fields: object) -> int:
    sampling = common_pb2.SamplingParams(ignore_eos=True, temperature=0.0)
    return await router.submit(PROMPT, num_tokens, model="", sampling=sampling, **fields)


def expected(num_tokens: int) -> list[int]:
    return stub_model.generated(PROMPT, num_tokens, seed=0)


async def until_worker(router: FakeRouter, worker_id: str, state: object) -> None:
    """Wait until a scheduler reports a worker in a state; None: until it reports it no more."""
    watch = router.stub.WatchPool(scheduler_pb2.WatchPoolRequest())
    states: dict[str, object] = {}
    try:
        async with asyncio.timeout(60):
            async for snapshot in watch:
                states = {worker.worker_id: worker.state for worker in snapshot.workers}
                if states.get(worker_id) == state:
                    return
    except TimeoutError:
        raise AssertionError(f"{worker_id} is not {state}; there is {states}") from None
    finally:
        watch.cancel()


async def test_an_owner_that_was_stopped_through_the_end_of_its_lease_is_refused(cluster: Cluster):
    await cluster.worker("w-0")
    first = await cluster.scheduler("s-0")
    old = await cluster.router(first)
    await until_worker(old, "w-0", READY)
    second = await cluster.scheduler("s-1")
    new = await cluster.router(second, "r1")
    running = await submit(old, LONG)
    await old.has_tokens(running, 3)
    first.signal(signal.SIGSTOP)
    await until_worker(new, "w-0", READY)
    handle = await submit(new, SHORT)
    first.signal(signal.SIGCONT)
    await first.until_logged("another scheduler has taken over the worker")
    await first.until_logged("w-0 is owned by another scheduler now")
    async with asyncio.timeout(60):
        refusal = await old.refused(running)
        assert refusal.reason == scheduler_pb2.REFUSAL_REASON_WORKER_LOST
        assert await new.finished(handle) == [expected(SHORT)]
        again = await submit(new, SHORT)
        assert await new.finished(again) == [expected(SHORT)]
    assert "another scheduler has taken over" not in second.log


async def test_a_worker_whose_pod_is_deleted_finishes_what_it_has(cluster: Cluster):
    await cluster.worker("w-0")
    scheduler = await cluster.scheduler("s-0")
    router = await cluster.router(scheduler)
    await until_worker(router, "w-0", READY)
    running = await submit(router, LONG, worker_id="w-0")
    await router.has_tokens(running, 3)
    await cluster.worker("w-1")
    await until_worker(router, "w-1", READY)
    cluster.namespace.delete_pod("w-0")
    await until_worker(router, "w-0", DRAINING)
    async with asyncio.timeout(60):
        other = await submit(router, SHORT)
        assert await router.finished(other) == [expected(SHORT)]
        assert await router.finished(running) == [expected(LONG)]
    await until_worker(router, "w-0", None)


async def test_a_scheduler_that_ends_leaves_its_workers_to_another_at_once(cluster: Cluster):
    await cluster.worker("w-0")
    # Of a lease that ends by itself nobody would hear.
    first = await cluster.scheduler("s-0", "--ownership-lease-duration-s", "600")
    await until_worker(await cluster.router(first), "w-0", READY)
    second = await cluster.scheduler("s-1")
    router = await cluster.router(second, "r1")
    first.signal(signal.SIGTERM)
    await until_worker(router, "w-0", READY)
    async with asyncio.timeout(60):
        assert await first.process.wait() == 0
