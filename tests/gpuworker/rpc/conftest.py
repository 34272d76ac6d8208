"""Fixtures of the worker service's tests."""

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import transformers

from gpuworker.rpc.service import FULL_NAME, GpuWorkerService, WorkerIdentity
from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.serving import GrpcServer, ServingConfig
from tests.gpuworker.rpc.serving import GatedRunner, Worker
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


@pytest.fixture
async def worker(checkpoint: Path) -> AsyncIterator[Worker]:
    """A worker whose model is not set yet: `load` it."""
    with ThreadPoolExecutor(1, thread_name_prefix="model") as thread:
        service = GpuWorkerService(WorkerIdentity("w1", "tiny", "mixed"), thread)
        server = GrpcServer(ServingConfig(), [FULL_NAME])
        service.add_to(server.server)
        address = await server.start()
        channel = open_channel(address, ChannelConfig())
        runner = GatedRunner(make_runner(checkpoint, num_kv_blocks=20))
        made = Worker(service, channel, runner)
        made.server = server
        yield made
        runner.gate.set()
        await channel.close()
        await server.stop(0)
