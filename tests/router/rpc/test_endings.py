"""Every way in which a request ends early, and that nothing of it is left anywhere."""

import asyncio
import random
import sys
import time

import grpc
import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.service.channels import open_channel
from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc, scheduler_pb2
from router.__main__ import drain
from tests.router.fake_scheduler import FakeScheduler, Script, worker
from tests.router.stack import running_stack

ABORTED = inference_pb2.AbortOutcome.RESULT_ABORTED
ALREADY_FINISHED = inference_pb2.AbortOutcome.RESULT_ALREADY_FINISHED
NOT_FOUND = inference_pb2.AbortOutcome.RESULT_NOT_FOUND


def endless(submission):
    return Script([65] * submission.sampling.max_tokens)


def slow_scheduler():
    return FakeScheduler(script=endless, interval_s=0.002)


@pytest.fixture
async def stack():
    async with running_stack(scheduler=slow_scheduler()) as running:
        yield running


async def abort(stack, *request_ids):
    response = await stack.stub.Abort(inference_pb2.AbortRequest(request_ids=request_ids))
    return [outcome.result for outcome in response.outcomes]


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


def in_seconds(seconds):
    stamp = Timestamp()
    stamp.FromNanoseconds(int((time.time() + seconds) * 1e9))
    return stamp


async def test_abort_ends_a_running_stream_well_and_tells_the_scheduler(stack):
    call = stack.generate(request_id="r", sampling={})
    await call.read()
    assert await abort(stack, "r", "other") == [ABORTED, NOT_FOUND]
    messages = await stack.rest(call)
    assert messages[-1].outputs[-1].finish_reason == common_pb2.FINISH_REASON_ABORTED
    assert messages[-1].usage.completion_tokens > 0
    await stack.until(lambda: stack.scheduler.cancellations)
    assert stack.scheduler.cancellations == [("r", scheduler_pb2.CANCEL_REASON_ABORTED)]
    assert await abort(stack, "r") == [ALREADY_FINISHED]


async def test_abort_ends_what_waits_here_without_asking_a_scheduler(stack):
    stack.scheduler.set_workers(worker(max_num_seqs=1))
    await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 1)
    calls = [stack.generate(request_id=f"r-{i}", sampling={}) for i in range(12)]
    await stack.until(lambda: stack.router.num_queued == 3)
    waiting = [c.request_id for c in stack.router._dispatcher.queue]
    assert await abort(stack, *waiting) == [ABORTED] * 3
    assert stack.router.num_queued == 0
    assert len(stack.scheduler.submissions) == 9
    await abort(stack, *(f"r-{i}" for i in range(12)))
    for call in calls:
        last = (await stack.rest(call))[-1]
        assert last.outputs[-1].finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_abort_while_the_prompt_is_being_read_is_kept(stack, monkeypatch):
    reading, go_on = asyncio.Event(), asyncio.Event()
    read = stack.services.prompts.read

    async def slowly(*args, **kwargs):
        reading.set()
        await go_on.wait()
        return await read(*args, **kwargs)

    monkeypatch.setattr(stack.services.prompts, "read", slowly)
    call = stack.generate(request_id="r")
    await reading.wait()
    assert await abort(stack, "r") == [ABORTED]
    go_on.set()
    assert (await error_of(call)).code is grpc.StatusCode.ABORTED
    assert not stack.scheduler.submissions


@pytest.mark.parametrize(
    ("request_ids", "message"), [([], "1 to 1000"), (["ok", "not ok"], r"request_ids\[1\]")]
)
async def test_abort_checks_its_ids(stack, request_ids, message):
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        await abort(stack, *request_ids)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_closes_its_call_ends_the_request(stack):
    call = stack.generate(request_id="r", sampling={"n": 3})
    await call.read()
    call.cancel()
    await stack.until(lambda: len(stack.scheduler.cancellations) == 3)
    assert {reason for _, reason in stack.scheduler.cancellations} == {
        scheduler_pb2.CANCEL_REASON_ABORTED
    }
    await stack.until(lambda: stack.is_empty)


async def test_a_client_that_loses_its_connection_ends_its_requests(stack):
    async with open_channel(stack.address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(inference_pb2.GenerateRequest(text="hello")) for _ in range(5)]
        for call in calls:
            await call.read()
    await stack.until(lambda: len(stack.scheduler.cancellations) == 5 and stack.is_empty)


CLIENT = """
import sys, grpc
from headrace.v1 import inference_pb2, inference_pb2_grpc
stub = inference_pb2_grpc.InferenceStub(grpc.insecure_channel(sys.argv[1]))
for message in stub.Generate(inference_pb2.GenerateRequest(text="hello")):
    print("token", flush=True)
"""


@pytest.mark.system
async def test_a_killed_client_ends_its_request(stack):
    client = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, stack.address, stdout=asyncio.subprocess.PIPE
    )
    assert await client.stdout.readline() == b"token\n"
    client.kill()
    await client.communicate()
    await stack.until(lambda: stack.scheduler.cancellations and stack.is_empty)


async def test_the_calls_own_deadline_ends_the_request_as_late(stack):
    error = await error_of(stack.generate(request_id="r", timeout=0.3, sampling={}))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await stack.until(lambda: stack.scheduler.cancellations)
    assert stack.scheduler.cancellations == [("r", scheduler_pb2.CANCEL_REASON_DEADLINE)]


async def test_a_requests_deadline_ends_a_running_stream_with_its_reason(stack):
    messages = await stack.answer(request_id="r", deadline=in_seconds(0.3), sampling={})
    assert messages[-1].outputs[-1].finish_reason == common_pb2.FINISH_REASON_DEADLINE
    assert messages[-1].usage.completion_tokens > 0
    assert stack.scheduler.submissions[0].deadline_unix_s == pytest.approx(time.time(), abs=5)
    await stack.until(lambda: stack.scheduler.cancellations)
    assert stack.scheduler.cancellations == [("r", scheduler_pb2.CANCEL_REASON_DEADLINE)]


async def test_the_earlier_of_both_deadlines_counts(stack):
    await stack.answer(deadline=in_seconds(0.2), timeout=500, sampling={})
    assert stack.scheduler.submissions[0].deadline_unix_s < time.time() + 1


async def test_a_deadline_that_passes_in_the_queue_is_an_error_and_never_dispatched(stack):
    stack.scheduler.set_workers(worker(max_num_seqs=1))
    await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 1)
    ahead = [stack.generate(sampling={}) for _ in range(9)]
    await stack.until(lambda: stack.router.num_in_flight == 9)
    error = await error_of(stack.generate(request_id="late", deadline=in_seconds(0.2)))
    assert (error.code, error.reason) == (
        grpc.StatusCode.DEADLINE_EXCEEDED,
        "DEADLINE_EXCEEDED",
    )
    assert "late" not in [s.request_id for s in stack.scheduler.submissions]
    for call in ahead:
        call.cancel()


async def test_a_deadline_in_the_past_is_refused_at_once(stack):
    error = await error_of(stack.generate(deadline=in_seconds(-1)))
    assert (error.code, error.reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "DEADLINE_PASSED")
    assert not stack.scheduler.submissions


async def test_aborts_at_any_moment_leave_nothing(stack):
    chance = random.Random(5)

    async def one(number):
        request_id = f"r-{number}"
        call = stack.generate(
            "hello " * chance.randrange(1, 40),
            request_id=request_id,
            sampling={"n": chance.choice([1, 4]), "max_tokens": chance.randrange(1, 30)},
        )
        how = chance.choice(["cancel", "abort", "read"])
        try:
            for _ in range(chance.randrange(4)):
                await call.read()
            if how == "cancel":
                call.cancel()
            if how == "abort":
                await abort(stack, request_id)
            await stack.rest(call)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            pass

    for _ in range(4):
        await asyncio.gather(*(one(random.random()) for _ in range(40)))
    await stack.until(lambda: stack.is_empty and not stack.scheduler.live)


async def test_an_abort_hits_its_own_epoch_of_an_id_only(stack):
    for _ in range(50):
        call = stack.generate(request_id="same", sampling={})
        await call.read()
        assert await abort(stack, "same") == [ABORTED]
        assert (await stack.rest(call))[-1].HasField("usage")
        await stack.until(lambda: not stack.router.num_live)
    await stack.until(lambda: not stack.scheduler.live)
    assert len(stack.scheduler.cancellations) == 50


async def test_draining_refuses_new_requests_and_lets_live_ones_finish(stack):
    stack.scheduler.script = lambda _: Script([65] * 100)
    call = stack.generate(sampling={})
    await call.read()
    draining = asyncio.create_task(drain(stack.router, 20, "finish"))
    await stack.until(lambda: stack.router.is_draining)
    error = await error_of(stack.generate())
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert error.retry_after_s is not None
    last = (await stack.rest(call))[-1]
    assert last.outputs[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
    await draining


async def test_draining_aborts_what_is_not_done_in_time(stack):
    call = stack.generate(sampling={})
    await call.read()
    await drain(stack.router, 0.05, "finish")
    last = (await stack.rest(call))[-1]
    assert last.outputs[-1].finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_without_a_store_a_handover_tells_callers_to_go_elsewhere_and_of_no_end(stack):
    call = stack.generate(sampling={})
    await call.read()
    await drain(stack.router, 0.05, "handover")
    outputs = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        while (message := await call.read()) is not grpc.aio.EOF:
            outputs.extend(message.outputs)
    assert from_rpc_error(caught.value).reason == "DRAINING"
    assert not any(output.finish_reason for output in outputs)
    await stack.until(lambda: not stack.scheduler.live)
