"""Two schedulers that are given one worker: the one that was started later drives it."""

from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from gpuworker.engine import LoadedModel
from gpuworker.rpc.service import FULL_NAME, GpuWorkerService, Identity
from headrace.service.serving import GrpcServer, ServingConfig
from scheduler.rpc.gpuworker_client import GpuWorkerClient
from scheduler.worker import WorkerTakenError
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint
from tests.scheduler.harness import RunningScheduler, router_to, running_scheduler, until

PROMPT = [9, 20, 31, 42, 53]


class RealWorker:
    """The worker's service over a tiny model, where a scheduler's harness wants a worker."""

    errors: tuple[str, ...] = ()

    def __init__(self, service: GpuWorkerService, server: GrpcServer, address: str) -> None:
        self.service = service
        self.address = address
        self._server = server

    async def kill(self) -> None:
        """The fixture stops it: it outlives each of its schedulers."""

    async def stop(self) -> None:
        await self._server.stop(0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[RealWorker]:
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        service = GpuWorkerService(Identity("w1", "tiny", "mixed"), thread)
        server = GrpcServer(ServingConfig(), [FULL_NAME])
        service.add_to(server.server)
        worker = RealWorker(service, server, await server.start())
        runner = make_runner(checkpoint, num_kv_blocks=60)
        service.set_engine(LoadedModel(runner, "cpu", "float32", "float32", pipeline_depth=2))
        yield worker
        await worker.stop()


@pytest.fixture
def num_refused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a scheduler has been told that a newer one drives the worker."""
    count = 0
    execute = GpuWorkerClient.execute

    async def counted(self: GpuWorkerClient) -> object:
        nonlocal count
        try:
            return await execute(self)
        except WorkerTakenError:
            count += 1
            raise

    monkeypatch.setattr(GpuWorkerClient, "execute", counted)
    return lambda: count


async def answer(scheduler: RunningScheduler, num_tokens: int) -> list[int]:
    """What a request gets from a scheduler."""
    async with router_to(scheduler) as router:
        handle = await router.submit(PROMPT, num_tokens, model="tiny")
        (tokens,) = await router.finished(handle)
        return tokens


async def test_the_later_one_keeps_the_worker_and_the_earlier_gets_it_back_at_its_end(
    worker: RealWorker, num_refused: Callable[[], int]
) -> None:
    async with running_scheduler([worker], term=1, has_company=True) as earlier:
        await earlier.ready()
        expected = await answer(earlier, 6)
        async with running_scheduler([worker], term=2, has_company=True) as later:
            await later.ready()
            (engine,) = later.pool.engines
            # The earlier one has asked for the worker several times by then, and got nothing.
            await until(lambda: num_refused() >= 3)
            assert earlier.ready_workers() == []
            assert await answer(later, 6) == expected
            assert later.pool.engines == [engine], "the worker went back and forth"
        await earlier.ready()
        assert await answer(earlier, 6) == expected


async def test_a_scheduler_that_starts_while_a_later_one_has_the_worker_waits_for_it(
    worker: RealWorker, num_refused: Callable[[], int]
) -> None:
    async with running_scheduler([worker], term=2, has_company=True) as later:
        await later.ready()
        async with running_scheduler([worker], term=1, has_company=True) as earlier:
            await until(lambda: num_refused() >= 1)
            assert earlier.ready_workers() == []
            assert later.ready_workers() == ["w1"]
            assert len(await answer(later, 3)) == 3
