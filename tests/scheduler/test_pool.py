"""Workers that come late, die, hang and come back; requests that outlive them."""

import asyncio
import logging
import pkgutil
import random
import time

import pytest

from headrace.status.states import Writer
from headrace.status.store import StatusStore
from headrace.v1 import common_pb2, scheduler_pb2
from headrace.vocabulary import WorkerState
from scheduler.build import build_pool
from scheduler.config import PoolSettings, SchedulerSettings
from scheduler.core.plan import RequestStatus
from scheduler.request_log import RequestLog
from scheduler.switchboard import Switchboard
from scheduler.worker import WorkerLostError, WorkerResult, WorkerSpec
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import PATIENCE_S, router_to, running_scheduler, until

PROMPTS = [[20 + i, 30 + i, 40 + i] for i in range(8)]


def state_of(scheduler, worker_id: str) -> WorkerState | None:
    loads = scheduler.pool.snapshot()
    return next((load.state for load in loads if load.info.worker_id == worker_id), None)


async def test_a_worker_is_ready_once_its_model_is_loaded(caplog):
    caplog.set_level(logging.INFO)
    worker = FakeGpuWorker()
    worker.is_loaded = False
    await worker.start()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        early = await router.submit(PROMPTS[0], 3)
        assert (await router.refused(early)).reason == scheduler_pb2.REFUSAL_REASON_NO_WORKER
        await until(lambda: "is not ready" in caplog.text)
        worker.is_loaded = True
        await scheduler.ready()
        handle = await router.submit(PROMPTS[0], 3)
        assert await router.finished(handle) == [expected_tokens(PROMPTS[0], 3)]
    reasons = [r.getMessage() for r in caplog.records if "is not ready" in r.getMessage()]
    assert len(reasons) == len(set(reasons)) >= 1


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize(
    ("place", "is_in_a_step"),
    [
        ("scheduler.rpc.gpuworker_client.GpuWorkerClient.describe", False),
        ("scheduler.pool.Pool._start", False),
        # An engine plans once before any request comes.
        ("scheduler.engine.WorkerEngine._plan_step", False),
        ("scheduler.engine.WorkerEngine._apply_result", True),
        ("scheduler.rpc.gpuworker_client.ExecuteStream.receive", False),
    ],
)
async def test_a_panic_costs_one_engine_and_no_request(place, is_in_a_step, monkeypatch, caplog):
    worker = FakeGpuWorker()
    await worker.start()
    owner_name, _, name = place.rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    inner, num_calls = getattr(owner, name), 0

    def panic_once(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise Panic
        return inner(*args)

    monkeypatch.setattr(owner, name, panic_once)
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        # A request must find the worker that has come back, not the one that is about to be lost.
        await until(lambda: is_in_a_step or num_calls > 1)
        await scheduler.ready()
        handle = await router.submit(PROMPTS[0], 3)
        assert await router.finished(handle) == [expected_tokens(PROMPTS[0], 3)]
    assert "Panic" in caplog.text


def request_id_of(plan) -> str | None:
    """Who the plan places, if anybody."""
    return plan.row_requests[0].request_id if plan.row_requests else None


class StreamThatBreaksWhenLeft:
    """A stream that breaks at the very moment it is given up."""

    def __init__(self) -> None:
        self.has_begun = asyncio.Event()

    async def send(self, *_: object) -> None:
        raise AssertionError("there is nothing to run")

    async def receive(self) -> WorkerResult:
        self.has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise WorkerLostError("it died") from None
        raise AssertionError("nobody sets it")

    def close(self) -> None:
        pass


class Connector:
    def __init__(self, stream: StreamThatBreaksWhenLeft) -> None:
        self.stream = stream

    async def describe(self) -> WorkerSpec:
        return WorkerSpec(
            worker_id="w0",
            incarnation="1",
            model="fake",
            max_model_len=64,
            block_size=4,
            num_kv_blocks=16,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            vocab_size=100,
        )

    async def execute(self) -> StreamThatBreaksWhenLeft:
        return self.stream

    async def close(self) -> None:
        pass


async def test_a_worker_lost_while_the_scheduler_stops_does_not_keep_it_from_stopping():
    stream = StreamThatBreaksWhenLeft()
    switchboard = Switchboard(RequestLog(StatusStore("", Writer.SCHEDULER), "s0", clock=time.time))
    pool = build_pool(switchboard, SchedulerSettings(), PoolSettings(), clock=time.time)
    pool.add("w0:1", Connector(stream))
    running = asyncio.create_task(pool.run())
    await stream.has_begun.wait()
    running.cancel()
    done, _ = await asyncio.wait([running], timeout=PATIENCE_S)
    assert done, "it looks for the worker again"
    assert running.cancelled()


async def test_a_worker_that_shuts_down_finishes_what_it_has_and_is_left_alone(caplog):
    caplog.set_level(logging.INFO)
    old, new = FakeGpuWorker("w0"), FakeGpuWorker("w1")
    old.hold()
    await old.start()
    await new.start()
    async with running_scheduler([old, new]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready(2)
        first = await router.submit(PROMPTS[0], 20, worker_id="w0")
        await old.release(3)
        await old.step_begun(4)
        old.drain()
        await until(lambda: state_of(scheduler, "w0") is WorkerState.DRAINING)
        others = await router.submit_all([(prompt, 5) for prompt in PROMPTS[1:]])
        for handle, prompt in zip(others, PROMPTS[1:], strict=True):
            assert await router.finished(handle) == [expected_tokens(prompt, 5)]
        named = await router.submit(PROMPTS[1], 5, worker_id="w0")
        assert (await router.refused(named)).reason == scheduler_pb2.REFUSAL_REASON_WORKER_LOST
        await old.release()
        assert await router.finished(first) == [expected_tokens(PROMPTS[0], 20)]
        await until(lambda: old.num_streams == 0)
        await until(lambda: state_of(scheduler, "w0") is WorkerState.LOST)
        assert {request_id_of(plan) for plan in old.plans} == {None, request_id_of(old.plans[0])}
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_an_idle_worker_that_shuts_down_is_let_go_at_once():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        handle = await router.submit(PROMPTS[0], 3)
        assert await router.finished(handle) == [expected_tokens(PROMPTS[0], 3)]
        worker.drain()
        await until(lambda: worker.num_streams == 0)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_worker_that_dies_while_decoding_leaves_no_gap_and_no_duplicate(depth):
    worker = FakeGpuWorker()
    worker.hold()
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handles = await router.submit_all([(prompt, 40) for prompt in PROMPTS])
            await worker.release(6)
            await worker.step_begun(7)  # in the middle of a step
            await worker.kill()
            await until(lambda: state_of(scheduler, "w0") is WorkerState.LOST)
            assert not any(router.received[handle].finished for handle in handles)
            await worker.start()
            await worker.release()
            assert await router.finished(*handles) == [
                expected_tokens(prompt, 40) for prompt in PROMPTS
            ]


async def test_another_worker_of_the_model_goes_on_with_a_lost_one_s_requests():
    one, other = FakeGpuWorker("one"), FakeGpuWorker("other")
    await one.start()
    await other.start()
    one.hold()
    async with running_scheduler([one, other]) as scheduler:
        await scheduler.ready(2)
        async with router_to(scheduler) as router:
            handles = await router.submit_all([(p, 30) for p in PROMPTS], worker_id="one")
            await one.release(5)
            await one.step_begun(6)
            await one.kill()
            assert await router.finished(*handles) == [
                expected_tokens(prompt, 30) for prompt in PROMPTS
            ]
            assert all(router.received[h].admitted.worker_id == "one" for h in handles)
    resumed = {r.request_id: r for plan in other.plans for r in plan.row_requests}
    assert len(resumed) == len(PROMPTS)
    assert all(len(r.token_ids) > 4 * r.num_prompt_tokens for r in resumed.values())


@pytest.mark.parametrize("num_generated", [0, 4, 5, 12])
async def test_a_request_moved_to_a_small_pool_ends_with_length(num_generated):
    """One block of 16 carries 17 tokens; the prompt has 12, and may have 12 more with it."""
    prompt = list(range(20, 32))
    tokens = expected_tokens(prompt, 12)
    one, small = FakeGpuWorker("one"), FakeGpuWorker("small", num_kv_blocks=1, block_size=16)
    await one.start()
    await small.start()
    one.hold()
    async with running_scheduler([one, small]) as scheduler:
        await scheduler.ready(2)
        async with router_to(scheduler) as router:
            handle = await router.submit(prompt, 100, worker_id="one")
            if num_generated:
                await one.release(num_generated)
            await one.step_begun(num_generated + 1)
            await one.kill()
            (received,) = await router.finished(handle)
            reason = router.received[handle].finished.reason
    assert received == tokens[: max(num_generated, 5)]
    assert reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_worker_that_hangs_is_given_up_and_its_requests_go_on():
    hanging, well = FakeGpuWorker("hanging"), FakeGpuWorker("well")
    await hanging.start()
    await well.start()
    hanging.hold()
    async with running_scheduler([hanging, well]) as scheduler:
        await scheduler.ready(2)
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPTS[0], 10, worker_id="hanging")
            await hanging.step_begun(1)
            # Of the hanging one only: the other may be slow on a busy machine.
            engine = scheduler.pool._workers[0].engine
            engine._step_timeout_s = 0.01
            engine._wake.set()
            assert await router.finished(handle) == [expected_tokens(PROMPTS[0], 10)]
            await hanging.release()
            # It is not dead, only late: a new stream makes it useful again.
            await scheduler.ready(2)
            again = await router.submit(PROMPTS[1], 3, worker_id="hanging")
            assert await router.finished(again) == [expected_tokens(PROMPTS[1], 3)]


async def test_a_request_that_kills_every_worker_ends_as_an_error():
    worker = FakeGpuWorker()
    worker.hold()
    await worker.start()
    async with running_scheduler([worker], None, PoolSettings(max_num_losses=1)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPTS[0], 10)
            for _ in range(2):
                await worker.step_begun(len(worker.plans) or 1)
                await until(lambda: bool(scheduler.ready_workers()))
                await until(lambda: _is_stepping(scheduler))
                await worker.kill()
                await until(lambda: not scheduler.ready_workers())
                await worker.start()
            await router.finished(handle)
    finished = router.received[handle].finished
    assert finished.reason == common_pb2.FINISH_REASON_ERROR
    assert "died 2 times" in finished.message


def _is_stepping(scheduler) -> bool:
    engine = scheduler.pool._workers[0].engine
    return engine is not None and bool(engine._in_flight)


async def test_requests_without_a_worker_can_be_aborted_and_expire():
    worker = FakeGpuWorker()
    await worker.start()
    worker.hold()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            aborted = await router.submit(PROMPTS[0], 10)
            expiring = await router.submit(PROMPTS[1], 10, deadline_unix_s=time.time() + 3600)
            await until(lambda: _is_stepping(scheduler))
            await worker.kill()
            await until(lambda: len(scheduler.pool._stranded) == 2)
            await router.cancel(aborted)
            scheduler.skipped_s = 7200
            await router.finished(aborted, expiring)
    assert router.received[aborted].finished.reason == common_pb2.FINISH_REASON_ABORTED
    assert router.received[expiring].finished.reason == common_pb2.FINISH_REASON_DEADLINE


async def test_requests_without_a_worker_end_as_errors_after_a_while():
    worker = FakeGpuWorker()
    await worker.start()
    worker.hold()
    pool_settings = PoolSettings(requeue_timeout_s=0.2)
    async with running_scheduler([worker], None, pool_settings) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPTS[0], 10)
            await until(lambda: _is_stepping(scheduler))
            await worker.kill()
            await router.finished(handle)
    assert router.received[handle].finished.reason == common_pb2.FINISH_REASON_ERROR


async def test_cancelling_just_before_the_worker_dies_is_not_forgotten():
    worker = FakeGpuWorker()
    await worker.start()
    worker.hold()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handles = await router.submit_all([(prompt, 10) for prompt in PROMPTS])
            await until(lambda: _is_stepping(scheduler))
            engine = scheduler.pool._workers[0].engine
            # Both messages wait for the loop when it is ended.
            request = scheduler.switchboard.find(1, handles[0])
            engine.cancel(request, RequestStatus.ABORTED)
            await worker.kill()
            await worker.start()
            await worker.release()
            tokens = await router.finished(*handles)
    assert router.received[handles[0]].finished.reason == common_pb2.FINISH_REASON_ABORTED
    assert tokens[1:] == [expected_tokens(prompt, 10) for prompt in PROMPTS[1:]]


async def test_submissions_go_to_the_less_loaded_worker():
    one, other = FakeGpuWorker("one"), FakeGpuWorker("other")
    await one.start()
    await other.start()
    one.hold()
    other.hold()
    async with running_scheduler([one, other]) as scheduler:
        await scheduler.ready(2)
        async with router_to(scheduler) as router:
            handles = await router.submit_all([(prompt, 5) for prompt in PROMPTS])
            await until(lambda: len(scheduler.switchboard.requests) == len(handles))
            loads = scheduler.pool.snapshot()
            assert [load.num_running + load.num_waiting for load in loads] == [4, 4]
            await one.release()
            await other.release()
            await router.finished(*handles)


async def test_workers_that_call_themselves_alike_are_told_apart(caplog):
    one, other = FakeGpuWorker("host"), FakeGpuWorker("host")
    await one.start()
    await other.start()
    async with running_scheduler([one, other]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready(2)
        names = set(scheduler.ready_workers())
        assert len(names) == 2
        assert names < {"host", f"host@{one.address}", f"host@{other.address}"}
        for name in sorted(names):
            handle = await router.submit(PROMPTS[0], 3, worker_id=name)
            assert await router.finished(handle) == [expected_tokens(PROMPTS[0], 3)]
            assert router.received[handle].admitted.worker_id == name
    assert "--worker-id" in caplog.text


@pytest.mark.parametrize("depth", [1, 2])
async def test_workers_that_die_again_and_again_lose_no_token_of_anybody(depth):
    workers = [FakeGpuWorker(name, num_kv_blocks=20, max_num_seqs=6) for name in ("one", "other")]
    for worker in workers:
        await worker.start()
    rng = random.Random(depth)
    asks = [
        ([rng.randrange(10, 900) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 30))
        for _ in range(60)
    ]
    settings = SchedulerSettings(pipeline_depth=depth)
    patient = PoolSettings(max_num_losses=99, quarantine_s=0)
    async with running_scheduler(workers, settings, patient) as scheduler:
        await scheduler.ready(2)
        async with router_to(scheduler) as router:
            handles = await router.submit_all(asks)
            for _ in range(8):
                victim = rng.choice(workers)
                victim.hold()
                await victim.release(rng.randrange(1, 12))
                await until(lambda victim=victim: victim.is_held or not router_is_busy(scheduler))
                await victim.kill()
                await until(lambda: len(scheduler.ready_workers()) < 2)
                await victim.start()
                await victim.release()
                await scheduler.ready(2)
            assert await router.finished(*handles) == [
                expected_tokens(prompt, num_tokens) for prompt, num_tokens in asks
            ]


def router_is_busy(scheduler) -> bool:
    return bool(len(scheduler.switchboard.requests))
