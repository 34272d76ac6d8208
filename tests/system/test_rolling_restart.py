"""Workers that are stopped as an orchestrator stops them, one by one, while requests run."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from headrace.client import HeadraceClient, Sampling
from headrace.local import LocalConfig, local_pool
from headrace.vocabulary import FinishReason
from tests.headrace.waiting import eventually

pytestmark = [pytest.mark.system, pytest.mark.asyncio]

MODEL = "tiny"
PATIENCE_S = 120.0
NUM_TOKENS = 200
LONG = Sampling(max_tokens=NUM_TOKENS, ignore_eos=True)
SHORT = Sampling(max_tokens=4, ignore_eos=True)


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
        # Both have served something, and have rows that nobody has asked for since.
        await asyncio.gather(*(client.complete("hello", sampling=LONG) for _ in range(8)))
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
