"""`python -m scheduler` as a process: flags, address file, a real store, traces, SIGTERM."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.service.columns import unpack_int32
from headrace.service.errors import from_rpc_error
from headrace.status.embedded import EmbeddedStore
from headrace.status.records import Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from headrace.v1 import scheduler_pb2
from tests.headrace.otlp_receiver import OtlpReceiver
from tests.headrace.waiting import eventually
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import FakeRouter, until

pytestmark = pytest.mark.system

PROMPT = [11, 12, 13, 14, 15]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
async def worker():
    worker = FakeGpuWorker(num_kv_blocks=8)
    await worker.start()
    yield worker
    await worker.kill()


@asynccontextmanager
async def scheduler_process(
    worker: FakeGpuWorker, tmp_path: Path, *flags: str, environ: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and its address; killed at the end if it still runs."""
    file = tmp_path / "address"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler", "--scheduler-id", "s0", "--worker", worker.address),
        *("--address-file", str(file), *flags),
        env=os.environ | {"HEADRACE_PARENT_DEATH": "1"} | dict(environ or {}),
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(file.exists)
        yield process, file.read_text(encoding="utf-8")
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def router_at(address: str) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(address, "r0")
    reading = asyncio.create_task(router.read())
    await router.send(hello=scheduler_pb2.Hello(router_id="r0"))
    watch = router.stub.WatchPool(scheduler_pb2.WatchPoolRequest())
    while not (await watch.read()).workers:
        pass
    watch.cancel()
    try:
        yield router
    finally:
        await router.close()
        await reading


async def test_sigterm_finishes_live_requests_and_exits_with_0(worker, tmp_path):
    worker.hold()
    async with scheduler_process(worker, tmp_path) as (process, address):
        async with router_at(address) as router:
            handle = await router.submit(PROMPT, 20)
            await worker.release(2)
            await router.has_tokens(handle, 1)
            process.send_signal(signal.SIGTERM)
            await worker.release()
            assert await router.finished(handle) == [expected_tokens(PROMPT, 20)]
            assert from_rpc_error(await router.ended()).reason == "DRAINED"
        assert await process.wait() == 0


async def test_what_cannot_be_finished_in_time_is_left_to_other_schedulers(worker, tmp_path):
    worker.hold()
    async with scheduler_process(worker, tmp_path, "--drain-timeout-s", "0.2") as (
        process,
        address,
    ):
        async with router_at(address) as router:
            handle = await router.submit(PROMPT, 20)
            await worker.step_begun(1)
            process.send_signal(signal.SIGTERM)
            assert from_rpc_error(await router.ended()).reason == "DRAINED"
            assert router.received[handle].finished is None
        assert await process.wait() == 0
    await worker.release()


async def test_status_records_follow_a_request_through_preemption_to_its_end(worker, tmp_path):
    async with EmbeddedStore() as embedded:
        environ = {"HEADRACE_SCHEDULER_STORE_URL": embedded.url}
        async with (
            StatusStore(embedded.url, Writer.ROUTER) as store,
            scheduler_process(worker, tmp_path, environ=environ) as (_, address),
            router_at(address) as router,
        ):
            for name in ("r0-0", "r0-1"):
                for state in (State.QUEUED, State.DISPATCHED):
                    await store.apply(
                        Update(request_id=name, state=state, time_unix_s=time.time(), epoch=1)
                    )
            # 8 blocks of 4 tokens: together they need 14.
            worker.hold()
            handles = await router.submit_all([([20] * 8, 20), ([30] * 8, 20)])

            async def is_preempted() -> bool:
                await worker.release(1)
                record = await store.get("r0-1")
                return record is not None and record.state is State.PREEMPTED

            await eventually(is_preempted)
            await worker.release()
            await router.finished(*handles)

            async def are_recorded() -> bool:
                records = [await store.get(name) for name in ("r0-0", "r0-1")]
                return all(r is not None and r.state is State.LENGTH_CAPPED for r in records)

            await eventually(are_recorded)
            record = await store.get("r0-1")
            assert record is not None
            assert (record.completion_tokens, record.scheduler_id) == (20, "s0")
            assert record.worker_id == "w0"
            assert record.worker_incarnation
            assert record.scheduler_incarnation == await store.incarnation_of("scheduler", "s0")


async def test_tokens_reach_the_store_while_the_request_runs_and_before_its_end(worker, tmp_path):
    async with EmbeddedStore() as embedded:
        environ = {"HEADRACE_SCHEDULER_STORE_URL": embedded.url}
        async with (
            StatusStore(embedded.url, Writer.ROUTER) as store,
            scheduler_process(worker, tmp_path, environ=environ) as (_, address),
            router_at(address) as router,
        ):
            for state in (State.QUEUED, State.DISPATCHED):
                update = Update(
                    request_id="r0-0",
                    state=state,
                    time_unix_s=time.time(),
                    create_time_unix_s=1.0,
                    spec=b"spec",
                )
                await store.apply(update)
            handle = await router.submit(PROMPT, 20)
            worker.hold()
            await worker.release(8)

            async def num_kept() -> int:
                stored = await store.load("r0-0")
                return stored.completions[0].num_tokens if stored is not None else 0

            async def are_some_kept() -> bool:
                return await num_kept() > 3

            await eventually(are_some_kept)
            await worker.release()
            await router.finished(handle)

            async def is_complete() -> bool:
                stored = await store.load("r0-0")
                return stored is not None and stored.completions[0].is_complete

            await eventually(is_complete)
            (kept,) = (await store.load("r0-0")).completions
            assert unpack_int32(kept.token_ids, "token_ids").tolist() == expected_tokens(PROMPT, 20)


async def test_a_traced_request_has_its_spans_and_the_worker_is_told(worker, tmp_path):
    receiver = OtlpReceiver()
    try:
        flags = ("--otlp-endpoint", receiver.endpoint)
        async with scheduler_process(worker, tmp_path, *flags) as (process, address):
            async with router_at(address) as router:
                parent = f"00-{TRACE_ID}-b7ad6b7169203331-01"
                handle = await router.submit(PROMPT, 3, traceparent=parent)
                await router.finished(handle)
            process.send_signal(signal.SIGTERM)
            await process.wait()
        spans = {span.name: span for span in await asyncio.to_thread(receiver.wait, 4)}
    finally:
        receiver.stop()
    schedule, step = spans["schedule"], spans["step"]
    assert {schedule.trace_id, step.trace_id} == {TRACE_ID}
    assert schedule.parent_id == "b7ad6b7169203331"
    assert {spans[name].parent_id for name in ("wait", "residency")} == {schedule.span_id}
    assert step.parent_id == spans["residency"].span_id
    assert schedule.attributes["gen_ai.usage.output_tokens"] == 3
    told = [plan.traceparent for plan in worker.plans if plan.traceparent]
    assert told == [f"00-{TRACE_ID}-{step.span_id}-01"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ((), "--worker"),
        (("--worker", "127.0.0.1:1", "--policy", "luck"), "--policy"),
        (("--worker", "127.0.0.1:1", "--config", "/no/such/file"), "cannot read"),
        (("--worker", "127.0.0.1:1", "--store-url", "ftp://x"), "store_url"),
    ],
)
async def test_wrong_settings_are_named_and_exit_with_2(flags, text):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "scheduler", *flags), stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 2, errors
    assert text in errors.decode()
    assert "Traceback" not in errors.decode()
