"""The process: it listens at once, says when it is ready, and leaves when told."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc.aio
import pytest
import transformers
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gpuworker.__main__ import main
from headrace.service.errors import from_rpc_error
from headrace.v1 import gpuworker_pb2, gpuworker_pb2_grpc
from tests.gpuworker.tiny import LLAMA, save_checkpoint
from tests.headrace.waiting import eventually

pytestmark = pytest.mark.system


# A worker whose first step finds the device gone.
FAILING = """
import torch
from gpuworker import __main__, runner

def fail(_runner, _plan):
    raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

runner.ModelRunner.launch = fail
__main__.main()
"""


async def start(
    *arguments: str, code: tuple[str, str] = ("-m", "gpuworker")
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *code,
        "--num-threads=1",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HEADRACE_PARENT_DEATH": "1"},
        cwd=Path(__file__).parents[2],
    )


def test_a_pod_of_a_group_is_refused_with_what_to_do(monkeypatch) -> None:
    monkeypatch.setenv("LWS_GROUP_SIZE", "4")
    done = CliRunner().invoke(main, ["--model=x"])
    assert done.exit_code
    assert "one of a group of 4 (LeaderWorkerSet)" in done.output
    assert "without leaderWorkerSet" in done.output


async def test_serves_from_start_to_sigterm(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", transformers.LlamaConfig(**LLAMA))
    address_file = tmp_path / "address"
    process = await start(
        f"--model={tmp_path / 'model'}",
        "--model-name=tiny",
        "--worker-id=w7",
        f"--address-file={address_file}",
        "--num-kv-blocks=50",
        "--block-size=32",
        "--max-model-len=100",
        "--max-num-seqs=3",
        "--max-num-batched-tokens=64",
        "--role=decode",
    )

    async def has_address() -> bool:
        return address_file.exists()

    await eventually(has_address, timeout_s=60)
    async with grpc.aio.insecure_channel(address_file.read_text()) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        async def is_serving() -> bool:
            answer = await health.Check(health_pb2.HealthCheckRequest())
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        await eventually(is_serving, timeout_s=60)
        stub = gpuworker_pb2_grpc.GpuWorkerStub(channel)
        worker = (await stub.Describe(gpuworker_pb2.DescribeRequest())).worker
        assert (worker.worker_id, worker.model, worker.device) == ("w7", "tiny", "cpu")
        assert (worker.num_kv_blocks, worker.block_size) == (50, 32)
        assert (worker.max_model_len, worker.max_num_seqs) == (100, 3)
        assert worker.max_num_batched_tokens == 64
        stream = stub.Execute()
        await stream.write(gpuworker_pb2.StepPlan(step_id=1))
        assert (await stream.read()).step_id == 1
        process.send_signal(signal.SIGTERM)
        assert (await stream.read()).draining
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await stream.read()
    assert from_rpc_error(ended.value).reason == "DRAINED"
    _, stderr = await process.communicate()
    assert process.returncode == 0
    # What takes long is said when it begins, and how long it took when it ends.
    stages = (
        b"imported torch in ",
        b"reading the weights",
        b"read 30 tensors in ",
        b"loaded tiny",
    )
    places = [stderr.find(stage) for stage in stages]
    assert min(places) >= 0
    assert places == sorted(places)
    assert b"Traceback" not in stderr


async def test_a_truncated_model_ends_the_process_with_the_tensors_name(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, transformers.LlamaConfig(**LLAMA))
    weights = tmp_path / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 10)
    process = await start(f"--model={tmp_path}")
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"is truncated" in stderr
    assert b"tensor '" in stderr


async def test_stops_while_the_model_is_still_loading(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", transformers.LlamaConfig(**LLAMA))
    address_file = tmp_path / "address"
    process = await start(f"--model={tmp_path / 'model'}", f"--address-file={address_file}")

    async def has_address() -> bool:
        return address_file.exists()

    await eventually(has_address, timeout_s=60)
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert process.returncode == 0


async def test_a_failed_device_ends_the_process(tmp_path: Path) -> None:
    """Every later step would fail as well: whoever started the worker can start it again."""
    save_checkpoint(tmp_path / "model", transformers.LlamaConfig(**LLAMA))
    address_file = tmp_path / "address"
    process = await start(
        f"--model={tmp_path / 'model'}", f"--address-file={address_file}", code=("-c", FAILING)
    )

    async def has_address() -> bool:
        return address_file.exists()

    await eventually(has_address, timeout_s=60)
    async with grpc.aio.insecure_channel(address_file.read_text()) as channel:
        stub = gpuworker_pb2_grpc.GpuWorkerStub(channel)

        async def is_loaded() -> bool:
            try:
                await stub.Describe(gpuworker_pb2.DescribeRequest())
            except grpc.aio.AioRpcError:
                return False
            return True

        await eventually(is_loaded, timeout_s=60)
        stream = stub.Execute()
        await stream.write(gpuworker_pb2.StepPlan(step_id=1))
        with pytest.raises(grpc.aio.AioRpcError):
            await stream.read()
        _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 3
    assert b"the device has failed" in stderr
