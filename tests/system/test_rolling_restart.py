"""Workers that are stopped as an orchestrator stops them, one by one, while requests run."""

import asyncio
import signal
import time
from pathlib import Path

import grpc
import pytest

from headrace.client import HeadraceClient, Sampling, ServiceError
from headrace.local import LocalConfig, local_pool
from headrace.types import WorkerStatus
from headrace.vocabulary import FinishReason
from tests.headrace.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.asyncio]

MODEL = "tiny"
PATIENCE_S = 120.0
NUM_TOKENS = 200
LONG = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
SHORT = Sampling(max_tokens=4, ignore_eos=True)


async def drain_and_undrain(client: HeadraceClient) -> None:
    """An operator takes a busy worker out of use and back, and nobody notices."""
    workers = {worker.worker_id for worker in (await client.pool()).workers}

    async def status() -> WorkerStatus:
        return next(w for w in (await client.pool()).workers if w.worker_id == drained.worker_id)

    running = [asyncio.create_task(client.complete("hello", sampling=LONG)) for _ in range(8)]

    async def are_all_busy() -> bool:
        return all(worker.num_running for worker in (await client.pool()).workers)

    await eventually(are_all_busy)
    drained = await client.drain(min(workers))
    assert drained.state == "draining"

    async def is_empty() -> bool:
        now = await status()
        return now.state == "draining" and not now.num_running and not now.num_waiting

    # New requests go elsewhere meanwhile.
    while not await is_empty():
        answer = await client.complete("hello", sampling=SHORT)
        assert answer.outputs[0].finish_reason is FinishReason.LENGTH
    for task in running:
        (answer,) = (await task).outputs
        assert len(answer.token_ids) == NUM_TOKENS
    assert (await client.undrain(drained.worker_id)).state == "ready"

    async def is_ready() -> bool:
        return (await status()).state == "ready"

    await eventually(is_ready)
    with pytest.raises(ServiceError, match=", ".join(sorted(workers))) as raised:
        await client.drain("nobody")
    assert raised.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_worker_told_to_stop_ends_when_its_requests_have_and_gets_no_more(
    tiny_model: Path,
) -> None:
    config = LocalConfig(
        model_path=tiny_model,
        model_name=MODEL,
        num_workers=2,
        store_url="",
        drain_timeout_s=PATIENCE_S,
        worker_flags=("--num-threads", "1", "--num-kv-blocks", "200"),
    )
    async with local_pool(config) as pool, HeadraceClient(pool.address) as client:
        # Both have served something then, and have rows that nobody has asked for since.
        await drain_and_undrain(client)
        running = [asyncio.create_task(client.complete("hello", sampling=LONG)) for _ in range(8)]

        async def is_running() -> bool:
            return all(worker.num_running for worker in (await client.pool()).workers)

        await eventually(is_running)
        child = next(c for c in pool.children if c.name == "gpuworker-0")
        child.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while child.process.returncode is None:
            answer = await client.complete("hello", sampling=SHORT)
            assert answer.outputs[0].finish_reason is FinishReason.LENGTH
            assert time.monotonic() - began < PATIENCE_S / 2, "it waits for what never comes"
        assert child.process.returncode == 0
        for task in running:
            (output,) = (await task).outputs
            assert len(output.token_ids) == NUM_TOKENS

        # One that has nothing to do goes at once.
        other = next(c for c in pool.children if c.name == "gpuworker-1")
        other.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S / 4):
            assert await other.process.wait() == 0
