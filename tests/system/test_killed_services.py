"""Services that are killed or told to stop while requests run: no answer changes."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from headrace.client import HeadraceClient, Sampling
from headrace.local import LocalConfig, LocalPool, local_pool
from headrace.types import Completion
from tests.headrace.time_spent import seconds_by_stage
from tests.headrace.waiting import eventually, until

pytestmark = [
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]

NUM_REQUESTS = 8
NUM_TOKENS = 300
STORE = "valkey-server"


class Running:
    """A pool of two workers, its client, and what the pool and the client have said."""

    def __init__(self, pool: LocalPool, client: HeadraceClient, lines: list[str]) -> None:
        self.pool = pool
        self.client = client
        self.lines = lines

    def pid(self, name: str) -> int:
        for child in self.pool.children:
            if child.name == name:
                return child.process.pid
        return next(c.pid for c in psutil.Process().children() if STORE in c.cmdline()[0])

    async def answers(self) -> list[Completion]:
        return await asyncio.gather(
            *(
                self.client.complete(
                    f"hello {number}",
                    sampling=Sampling(
                        temperature=1.0, seed=number, max_tokens=NUM_TOKENS, ignore_eos=True
                    ),
                )
                for number in range(NUM_REQUESTS)
            )
        )

    async def are_decoding(self) -> bool:
        workers = (await self.client.pool()).workers
        return sum(worker.num_running for worker in workers) == NUM_REQUESTS

    async def is_quiet(self) -> bool:
        """Nothing runs, all workers are back, and every KV block is free or cached."""
        pool = await self.client.pool()
        if pool.num_in_flight or pool.num_queued or len(pool.workers) < 2:
            return False
        if any(w.state != "ready" or w.num_running or w.num_waiting for w in pool.workers):
            return False
        audits = await self.client.audit()
        assert not [fault for audit in audits for fault in audit.faults]
        return not any(audit.num_owned_blocks for audit in audits)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny_model: Path) -> AsyncIterator[Running]:
    lines: list[str] = []
    config = LocalConfig(
        model_path=tiny_model,
        model_name="tiny",
        num_workers=2,
        # Too short for a request that has just begun.
        drain_timeout_s=0.1,
        worker_flags=("--num-threads", "1", "--num-kv-blocks", "200"),
    )
    async with (
        local_pool(config, log=lines.append) as pool,
        HeadraceClient(pool.address, tell=lines.append) as client,
    ):
        yield Running(pool, client, lines)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("gpuworker-0", signal.SIGKILL),
        ("gpuworker-1", signal.SIGTERM),
        ("scheduler", signal.SIGKILL),
        ("scheduler", signal.SIGTERM),
        ("router", signal.SIGKILL),
        ("router", signal.SIGTERM),
        (STORE, signal.SIGKILL),
    ],
)
async def test_the_end_of_a_service_changes_no_answer(
    running: Running, name: str, number: signal.Signals
) -> None:
    await eventually(running.is_quiet)
    undisturbed = [answer.outputs for answer in await running.answers()]
    del running.lines[:]
    asking = asyncio.create_task(running.answers())
    await eventually(running.are_decoding)
    ended = running.pid(name)
    os.kill(ended, number)
    answers = await asking
    assert [answer.outputs for answer in answers] == undisturbed
    told = [await running.client.explain(answer.request_id) for answer in answers]
    spent = sum(map(seconds_by_stage, told), start=Counter())
    assert min(spent["PREFILL"], spent["DECODE"]) > 0
    if number == signal.SIGKILL and name not in {STORE, "router"}:
        assert spent["RECOVERED"] > 0
    if name != STORE:
        await until(lambda: any(f"{name} is back after" in line for line in running.lines))
    assert running.pid(name) != ended
    await eventually(running.is_quiet)


async def test_a_router_that_dies_without_a_store_changes_no_answer(tiny_model: Path) -> None:
    config = LocalConfig(
        model_path=tiny_model,
        model_name="tiny",
        store_url="",
        worker_flags=("--num-threads", "1", "--num-kv-blocks", "200"),
    )
    lines: list[str] = []
    async with (
        local_pool(config) as pool,
        HeadraceClient(pool.address, tell=lines.append) as client,
    ):
        running = Running(pool, client, lines)
        undisturbed = [answer.outputs for answer in await running.answers()]
        asking = asyncio.create_task(running.answers())
        await eventually(running.are_decoding)
        os.kill(running.pid("router"), signal.SIGKILL)
        assert [answer.outputs for answer in await asking] == undisturbed
        assert any("resumed after" in line for line in lines)
