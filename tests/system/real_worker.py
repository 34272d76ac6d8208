"""The worker's service over a tiny model in this process, for schedulers of the harness."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from gpuworker.engine import LoadedModel
from gpuworker.rpc.service import FULL_NAME, GpuWorkerService, WorkerIdentity
from headrace.service.serving import GrpcServer, ServingConfig
from tests.gpuworker.tiny import make_runner


class RealWorker:
    """Stands where the harness of a scheduler wants a fake worker."""

    errors: tuple[str, ...] = ()

    def __init__(self, address: str) -> None:
        self.address = address

    async def kill(self) -> None:
        """The worker outlives each of its schedulers."""


@asynccontextmanager
async def real_worker(checkpoint: Path, *, num_kv_blocks: int = 60) -> AsyncIterator[RealWorker]:
    """A worker of two plans in flight; num_kv_blocks counts the null block."""
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        service = GpuWorkerService(WorkerIdentity("w1", "tiny", "mixed"), thread)
        server = GrpcServer(ServingConfig(), [FULL_NAME])
        service.add_to(server.server)
        address = await server.start()
        runner = make_runner(checkpoint, num_kv_blocks=num_kv_blocks)
        service.set_engine(LoadedModel(runner, "cpu", "float32", "float32", pipeline_depth=2))
        yield RealWorker(address)
        await server.stop(0)
