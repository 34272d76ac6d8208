"""Services that are killed while requests run: each answer is what it would have been."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from headrace.client import HeadraceClient, Sampling
from headrace.local import LocalConfig, LocalPool, local_pool
from headrace.types import Completion
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
        worker_flags=("--num-threads", "1", "--num-kv-blocks", "200"),
    )
    async with (
        local_pool(config, log=lines.append) as pool,
        HeadraceClient(pool.address, tell=lines.append) as client,
    ):
        yield Running(pool, client, lines)


@pytest.mark.parametrize("name", ["gpuworker-0", "gpuworker-1", "scheduler", "router", STORE])
async def test_a_kill_changes_no_answer(running: Running, name: str) -> None:
    await eventually(running.is_quiet)
    undisturbed = [answer.outputs for answer in await running.answers()]
    del running.lines[:]
    asking = asyncio.create_task(running.answers())
    await eventually(running.are_decoding)
    killed = running.pid(name)
    os.kill(killed, signal.SIGKILL)
    assert [answer.outputs for answer in await asking] == undisturbed
    if name != STORE:
        await until(lambda: any(f"{name} is back after" in line for line in running.lines))
    assert running.pid(name) != killed
    await eventually(running.is_quiet)
