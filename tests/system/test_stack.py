"""All services as real processes with the real small model, on a KV pool that is too small.

One stack serves every test here; after each, every KV block is free and nobody is in flight.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from headrace.client import HeadraceClient, ResumePolicy, Sampling, ServiceError
from headrace.local import LocalConfig, LocalPool, local_pool
from headrace.status.embedded import EmbeddedStore
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from headrace.types import AbortResult
from headrace.vocabulary import FinishReason
from tests.headrace.time_spent import seconds_by_stage
from tests.headrace.waiting import eventually

pytestmark = [
    pytest.mark.model,
    pytest.mark.system,
    pytest.mark.asyncio(loop_scope="module"),
]

NUM_BLOCKS = 40
BLOCK_SIZE = 4
MODEL = "smol"
WORKER_FLAGS = (
    *("--dtype", "float32", "--num-threads", "1", "--block-size", str(BLOCK_SIZE)),
    *("--num-kv-blocks", str(NUM_BLOCKS), "--max-model-len", "256"),
    *("--max-num-seqs", "32", "--max-num-batched-tokens", "128"),
)
WORDS = (
    *("the", "river", "ran", "below", "old", "stones", "while", "seven", "quiet", "birds"),
    *("counted", "every", "wheel", "at", "dawn"),
)


@dataclass(frozen=True)
class Stack:
    pool: LocalPool
    client: HeadraceClient
    store_url: str
    model_path: Path

    @property
    def scheduler_address(self) -> str:
        """Where the scheduler listens; only the kernel can say."""
        child = next(c for c in self.pool.children if c.name == "scheduler")
        process = psutil.Process(child.process.pid)
        connections = process.net_connections("unix")
        (socket,) = {c.laddr for c in connections if c.laddr.endswith("scheduler.sock")}
        return f"unix:{socket}"

    async def is_free(self) -> bool:
        pool = await self.client.pool()
        (worker,) = pool.workers
        return (worker.num_free_kv_blocks, worker.num_running, worker.num_waiting) == (
            NUM_BLOCKS,
            0,
            0,
        ) and not (pool.num_queued or pool.num_in_flight)

    async def is_decoding(self) -> bool:
        (worker,) = (await self.client.pool()).workers
        return bool(worker.num_running)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(model_path) -> AsyncIterator[Stack]:
    async with EmbeddedStore() as store:
        config = LocalConfig(
            model_path=model_path,
            model_name=MODEL,
            store_url=store.url,
            worker_flags=WORKER_FLAGS,
            drain_timeout_s=10.0,
        )
        async with local_pool(config) as pool, HeadraceClient(pool.address) as client:
            yield Stack(pool, client, store.url, model_path)
        codes = {child.name: child.process.returncode for child in pool.children}
        assert codes == {"gpuworker": 0, "scheduler": 0, "router": 0}, "SIGTERM must drain"


@pytest_asyncio.fixture(loop_scope="module")
async def stack(running) -> AsyncIterator[Stack]:
    yield running
    await eventually(running.is_free)


def prompt(number: int) -> str:
    """A prompt of its own length, 2 to 24 words."""
    length = 2 + number * 7 % 23
    return " ".join(WORDS[(number + i * i) % len(WORDS)] for i in range(length))


def sampling(number: int) -> Sampling:
    """Every third request samples, with a seed of its own; the others are greedy."""
    return Sampling(
        temperature=0.8 if number % 3 == 0 else 0.0,
        seed=number,
        max_tokens=6 + number * 5 % 5,
        ignore_eos=True,
    )


async def test_requests_together_give_exactly_what_each_gives_alone(stack):
    async def ask(number: int, salt: str) -> tuple[Sequence[int], str]:
        completion = await stack.client.complete(
            prompt(number),
            sampling=sampling(number),
            cache_salt=salt,
            request_id=f"{salt}-{number}",
        )
        return completion.outputs[0].token_ids, completion.request_id

    alone = [await ask(number, "alone") for number in range(32)]
    together = await asyncio.gather(*(ask(number, "together") for number in range(32)))
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in alone]
    explained = [await stack.client.explain(request_id) for _, request_id in together]
    assert sum(e.num_preemptions for e in explained) > 0, "the pool was meant to be too small"
    for history in explained:
        spent = seconds_by_stage(history)
        assert ("PREEMPTED" in spent) == (history.num_preemptions > 0)
        assert min(spent["TOKENIZE"], spent["PREFILL"], spent["OTHER"]) > 0


async def test_aborting_by_call_ends_the_stream_and_frees_the_blocks(stack):
    deltas = stack.client.generate(prompt(1), sampling=Sampling(max_tokens=120), request_id="abort")
    async with contextlib.aclosing(deltas):
        await anext(deltas)
        (outcome,) = await stack.client.abort(["abort"])
        assert outcome.result is AbortResult.ABORTED
        rest = [delta async for delta in deltas]
    assert rest[-1].finish_reason is FinishReason.ABORTED
    await eventually(stack.is_free)
    (again,) = await stack.client.abort(["abort"])
    assert again.result is not AbortResult.ABORTED


async def test_closing_streams_frees_the_blocks_of_queued_prefilling_and_decoding_requests(stack):
    async def ask(number: int) -> None:
        deltas = stack.client.generate(
            prompt(number) + " and" * 50, sampling=Sampling(max_tokens=60, ignore_eos=True)
        )
        async with contextlib.aclosing(deltas):
            async for _ in deltas:
                pass

    asking = [asyncio.create_task(ask(number)) for number in range(16)]
    await eventually(stack.is_decoding)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await eventually(stack.is_free)


async def test_a_killed_client_frees_its_blocks(stack):
    code = (
        "import asyncio, sys\n"
        "from headrace.client import HeadraceClient, Sampling\n"
        "from headrace.resuming import ResumePolicy\n"
        "async def main():\n"
        "    never = ResumePolicy(timeout_s=0)\n"
        "    async with HeadraceClient(sys.argv[1], resume=never) as client:\n"
        "        async for delta in client.generate('On and on', request_id='killed-client',\n"
        "                sampling=Sampling(max_tokens=120, ignore_eos=True)):\n"
        "            print(delta.text, flush=True)\n"
        "asyncio.run(main())\n"
    )
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, stack.pool.address), stdout=asyncio.subprocess.PIPE
    )
    await client.stdout.readline()
    client.kill()
    await client.wait()
    await eventually(stack.is_free)
    async with StatusStore(stack.store_url, Writer.ROUTER) as store:

        async def is_aborted() -> bool:
            record = await store.get("killed-client")
            return record is not None and record.state is State.ABORTED

        await eventually(is_aborted)


async def test_a_full_pool_refuses_nobody_whose_prompt_fits_and_names_one_that_does_not(stack):
    with pytest.raises(ServiceError) as refused:
        await stack.client.complete("word " * 300, sampling=Sampling(max_tokens=4))
    assert refused.value.code.name == "INVALID_ARGUMENT"
    answer = await stack.client.complete("word " * 150, sampling=Sampling(max_tokens=2))
    assert answer.outputs[0].finish_reason is FinishReason.LENGTH


@contextlib.asynccontextmanager
async def second_router(stack: Stack, folder: Path) -> AsyncIterator[tuple]:
    """Another router of the same scheduler, as process and address."""
    file = folder / "router"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--router-id", "router-1", "--model-name", MODEL),
        *("--scheduler", stack.scheduler_address, "--model", str(stack.model_path)),
        *("--address-file", str(file), "--drain-timeout-s", "20"),
        env=os.environ
        | {"HEADRACE_PARENT_DEATH": "1", "HEADRACE_ROUTER_STORE_URL": stack.store_url},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:

        async def is_listening() -> bool:
            return file.exists()

        await eventually(is_listening, timeout_s=20)
        once = ResumePolicy(timeout_s=0)
        async with HeadraceClient(file.read_text(encoding="utf-8"), resume=once) as client:

            async def is_ready() -> bool:
                with contextlib.suppress(ServiceError):
                    return any(m.num_ready_workers for m in await client.models())
                return False

            await eventually(is_ready)
            yield process, client
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_request_goes_on_without_its_router_and_leaves_no_blocks(stack, tmp_path):
    async with (
        StatusStore(stack.store_url, Writer.ROUTER) as store,
        second_router(stack, tmp_path) as (process, client),
    ):

        async def is_in(*states: State) -> bool:
            record = await store.get("orphan")
            return record is not None and record.state in states

        deltas = client.generate(
            prompt(3), sampling=Sampling(max_tokens=120, ignore_eos=True), request_id="orphan"
        )
        async with contextlib.aclosing(deltas):
            await anext(deltas)
            await eventually(lambda: is_in(State.DISPATCHED, State.RUNNING))
            process.kill()
            with pytest.raises(ServiceError):
                async for _ in deltas:
                    pass
        await eventually(stack.is_free)
        await eventually(lambda: is_in(State.LENGTH_CAPPED))
    answer = await stack.client.complete(prompt(3), sampling=Sampling(max_tokens=2))
    assert len(answer.outputs[0].token_ids) == 2


async def test_sigterm_lets_a_router_finish_what_it_has(stack, tmp_path):
    async with second_router(stack, tmp_path) as (process, client):
        deltas = client.generate(prompt(4), sampling=Sampling(max_tokens=12, ignore_eos=True))
        async with contextlib.aclosing(deltas):
            received = [await anext(deltas)]
            process.send_signal(signal.SIGTERM)
            received += [delta async for delta in deltas]
        assert received[-1].finish_reason is FinishReason.LENGTH
        assert sum(len(delta.token_ids) for delta in received) == 12
        assert await process.wait() == 0
