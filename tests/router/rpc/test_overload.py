"""More work than there is room for: who waits, who goes first, who is told to come back."""

import asyncio
import random
import time

import grpc
import grpc.aio
import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2
from router.core.permits import Permits
from tests.router.fake_scheduler import MODEL, FakeScheduler, Script, worker
from tests.router.stack import running_stack


async def with_slots(stack, max_num_seqs):
    """Wait until the router knows that its worker takes so many at once."""
    stack.scheduler.set_workers(worker(max_num_seqs=max_num_seqs))
    await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == max_num_seqs)


async def refusal_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


def in_seconds(seconds):
    stamp = Timestamp()
    stamp.FromNanoseconds(int((time.time() + seconds) * 1e9))
    return stamp


def slots(**settings):
    return running_stack(scheduler=FakeScheduler(is_paced=False), waiting_allowance=1, **settings)


async def serve_all(stack, calls):
    stack.scheduler.resume()
    for call in calls:
        async for _ in call:
            pass
    return [submission.request_id for submission in stack.scheduler.submissions]


async def test_four_permits_and_forty_slow_streams_never_make_five(monkeypatch):
    """A slow client's stream holds its permit to the end; counted at every change, not by looks."""
    counts = []
    for name in ("enter", "leave"):
        change = getattr(Permits, name)

        def counted(permits, *args, change=change):
            outcome = change(permits, *args)
            counts.append(permits.num_live)
            return outcome

        monkeypatch.setattr(Permits, name, counted)
    scheduler = FakeScheduler(interval_s=0.002)
    async with running_stack(scheduler=scheduler, max_live_requests=4) as stack:
        served = 0

        async def one():
            nonlocal served
            while True:
                try:
                    async for _ in stack.generate():
                        assert len(scheduler.live) <= 4
                        await asyncio.sleep(0.003)
                    served += 1
                except grpc.aio.AioRpcError as error:
                    refusal = from_rpc_error(error)
                    if refusal.reason != "TOO_MANY_LIVE":
                        raise
                    await asyncio.sleep(refusal.retry_after_s * random.random() * 0.1)
                else:
                    return

        await asyncio.gather(*(one() for _ in range(40)))
        assert (max(counts), served) == (4, 40)
        assert len(counts) > 80


async def test_a_tenant_with_long_prompts_does_not_crowd_out_one_with_short_ones():
    async with slots() as stack:
        await with_slots(stack, 1)
        calls = [stack.generate("x", request_id="first")]
        await stack.until(lambda: stack.router.num_in_flight == 1)
        for number in range(10):
            long = "h w" * 500
            calls.append(stack.generate(long, request_id=f"long-{number}", tenant="long"))
        await stack.until(lambda: stack.router.num_live == 11)
        for number in range(20):
            calls.append(stack.generate("h w", request_id=f"short-{number}", tenant="short"))
        await stack.until(lambda: stack.router.num_live == 31)
        order = await serve_all(stack, calls)
        # One long prompt was sent before any short one came, and one more is its turn.
        longs_before = [n for n in order[: order.index("short-19")] if n.startswith("long")]
        assert longs_before == ["long-0", "long-1"]


async def test_an_urgent_request_is_the_next_to_go_when_slots_are_full():
    async with slots(policy="priority") as stack:
        await with_slots(stack, 2)
        calls = []
        for number in range(8):
            calls.append(stack.generate(request_id=f"low-{number}", priority=10))
            await stack.until(lambda: stack.router.num_live == number + 1)  # noqa: B023
        calls.append(stack.generate(request_id="urgent", priority=0))
        await stack.until(lambda: stack.router.num_live == 9)
        order = await serve_all(stack, calls)
        assert order[:4] == ["low-0", "low-1", "low-2", "urgent"]


async def test_a_deadline_behind_a_longer_queue_is_dropped_before_any_work():
    async with slots() as stack:
        await with_slots(stack, 1)
        calls = [stack.generate() for _ in range(5)]
        await stack.until(lambda: stack.router.num_queued == 3)
        late = stack.generate(request_id="late", deadline=in_seconds(0.2))
        error = await refusal_of(late)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "late" not in await serve_all(stack, calls)


async def test_a_deadline_out_of_reach_is_refused_at_once():
    async with slots() as stack:
        await with_slots(stack, 1)
        calls = [stack.generate("h w" * 100, sampling={"max_tokens": 1}) for _ in range(200)]
        await stack.until(lambda: stack.router.num_queued == 198)
        rate = stack.router._dispatcher.rate(MODEL)
        while rate.tokens_per_s is None:
            stack.scheduler.step()
            await asyncio.sleep(0.1)
        wait_s = rate.predicted_wait_s(stack.router._dispatcher.queue.of(MODEL).tokens_ahead(""))
        assert wait_s > 0.5
        error = await refusal_of(stack.generate(deadline=in_seconds(wait_s / 4)))
        # Another reason if the deadline had passed meanwhile.
        assert error.reason == "DEADLINE_OUT_OF_REACH"
        await serve_all(stack, calls)


async def test_tenants_have_caps_of_their_own_and_named_ones_others():
    named = {"big": {"max_live_requests": 3}}
    async with slots(tenant={"max_live_requests": 1}, named=named) as stack:
        calls = [stack.generate(tenant="a"), *(stack.generate(tenant="big") for _ in range(3))]
        await stack.until(lambda: stack.router.num_live == 4)
        for tenant in ("a", "big"):
            error = await refusal_of(stack.generate(tenant=tenant))
            assert (error.code, error.reason) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TENANT_TOO_MANY_LIVE",
            )
            assert error.retry_after_s is not None
        calls.append(stack.generate(tenant="b"))
        await serve_all(stack, calls)


async def test_a_tenants_token_rate_counts_prompts_and_outputs():
    async with running_stack(tenant={"tokens_per_minute": 20}) as stack:
        assert await stack.answer("hello", sampling={"max_tokens": 19}, tenant="a")
        assert await stack.answer("hello", sampling={"max_tokens": 19}, tenant="b")
        error = await refusal_of(stack.generate(tenant="a"))
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "TENANT_RATE")
        assert 0 < error.retry_after_s <= 4


async def test_everything_of_a_tenant_is_aborted_at_once(stack):
    stack.scheduler.is_paced = False
    await with_slots(stack, 4)
    calls = [stack.generate(request_id=f"a-{i}", tenant="a") for i in range(20)]
    other = stack.generate(request_id="b", tenant="b")
    await stack.until(lambda: stack.router.num_live == 21)
    response = await stack.stub.Abort(inference_pb2.AbortRequest(tenant="a"))
    assert {o.request_id for o in response.outcomes} == {f"a-{i}" for i in range(20)}
    for call in calls:
        [message] = [m async for m in call]
        assert message.outputs[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
    await serve_all(stack, [other])
    with pytest.raises(grpc.aio.AioRpcError, match="must be empty when a tenant is given"):
        await stack.stub.Abort(inference_pb2.AbortRequest(tenant="a", request_ids=["b"]))


async def test_four_completions_aborted_again_and_again_leave_nothing(stack):
    stack.scheduler.script = lambda _: Script([65] * 50)

    async def one(number):
        request_id = f"r-{number}"
        call = stack.generate(request_id=request_id, sampling={"n": 4})
        if number % 2:
            await call.read()
        await stack.stub.Abort(inference_pb2.AbortRequest(request_ids=[request_id]))
        await stack.rest(call)

    for batch in range(2):
        await asyncio.gather(*(one(batch * 40 + number) for number in range(40)))
    await stack.until(lambda: stack.is_empty and not stack.scheduler.live)
    assert stack.router.meters.num_accepted == sum(stack.router.meters.num_ended.values())


async def test_every_request_let_in_is_live_or_has_ended_at_every_instant(stack):
    stack.scheduler.script = lambda s: Script(
        [65] * (s.sampling.seed % 20 + 1),
        reason=common_pb2.FINISH_REASON_ERROR
        if s.sampling.seed % 7 == 0
        else common_pb2.FINISH_REASON_LENGTH,
    )
    await with_slots(stack, 8)
    router, is_over = stack.router, False

    async def watch():
        while not is_over:
            assert router.meters.num_accepted == sum(router.meters.num_ended.values()) + len(
                router.live._requests
            )
            await asyncio.sleep(0)

    async def one(number):
        deadline = in_seconds(0.1) if number % 5 == 0 else None
        call = stack.generate(sampling={"seed": number}, deadline=deadline)
        if number % 3 == 0:
            await asyncio.sleep(0.001 * number % 0.05)
            call.cancel()
        try:
            await stack.rest(call)
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            return

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(one(number) for number in range(300)))
    await stack.until(lambda: stack.is_empty)
    is_over = True
    await watcher
    assert router.meters.num_accepted == sum(router.meters.num_ended.values())
    assert len(router.meters.num_ended) >= 2


async def test_one_huge_prompt_does_not_hold_up_fifty_short_ones(stack):
    stack.scheduler.is_paced = False
    stack.scheduler.set_workers(
        worker(max_model_len=200_000, num_kv_blocks=8_000, num_free_kv_blocks=8_000)
    )
    await stack.until(lambda: stack.router.pool.reports()[0].num_kv_blocks == 8_000)
    huge = stack.generate(token_ids={"ids": [1] * 100_000}, sampling={"max_tokens": 4})
    await stack.until(lambda: stack.scheduler.live)
    short = [stack.generate("hello", sampling={"max_tokens": 1}) for _ in range(50)]
    await stack.until(lambda: len(stack.scheduler.live) == 51)
    await serve_all(stack, [*short, huge])
