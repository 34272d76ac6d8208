"""Resume on the router that has the request: no store, and the bytes of the undisturbed call."""

import asyncio
import random

import grpc.aio
import pytest

from headrace.v1 import inference_pb2, scheduler_pb2
from tests.router.fake_scheduler import FakeScheduler, worker
from tests.router.putting_together import CASES, Client, error_of, fields_of, script
from tests.router.stack import running_stack


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_call_resumed_anywhere_again_and_again_gives_the_undisturbed_bytes(case):
    rng = random.Random(str(case))
    scheduler = FakeScheduler(script=script, interval_s=0.0005)
    async with running_stack(scheduler=scheduler) as stack:
        n = case.get("n", 1)
        whole = Client(n)
        await whole.read(stack.generate(**fields_of(case, "whole")))
        num_tokens = min(whole.positions)
        for chance in range(12):
            scheduler.tokens_per_step = rng.choice([1, 1, 2, 5])
            scheduler.limit = limit = rng.randrange(1, num_tokens)
            fields, client = fields_of(case, chance), Client(n)
            call = stack.generate(**fields)
            await client.read(call, 1, limit)
            for _ in range(rng.randrange(1, 4)):
                await client.read(call, rng.randrange(4), limit)
                earlier, call = call, stack.resume(fields["request_id"], *client.positions)
                await client.read(call, rng.randrange(2), limit)
                assert (await error_of(earlier)).reason == "RESUMED_ELSEWHERE"
            scheduler.limit = 10**9
            await client.read(call)
            assert client == whole


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_call_sent_again_to_a_router_that_knows_nothing_gives_the_rest(case):
    rng = random.Random(str(case))
    async with running_stack(scheduler=FakeScheduler(script=script)) as stack:
        n = case.get("n", 1)
        whole = Client(n)
        await whole.read(stack.generate(**fields_of(case, "whole")))
        for chance in range(8):
            fields, client = fields_of(case, f"a-{chance}"), Client(n)
            call = stack.generate(**fields)
            await client.read(call, 1, rng.randrange(1, min(whole.positions)))
            call.cancel()
            fields = fields_of(case, f"b-{chance}") | {"from_token_by_index": client.positions}
            await client.read(stack.generate(**fields))
            assert client == whole


async def test_a_call_that_goes_on_from_a_token_attaches_to_the_request_that_lives(stack):
    stack.scheduler.is_paced = False
    fields = {"request_id": "same", "sampling": {"max_tokens": 8, "seed": 1}}
    first, client = stack.generate(**fields), Client(1)
    await stack.until(lambda: stack.scheduler.live)
    stack.scheduler.step(3)
    await client.read(first, 1)
    again = stack.generate(**fields, from_token_by_index=client.positions)
    assert (await error_of(first)).reason == "RESUMED_ELSEWHERE"
    await stack.until(lambda: stack.scheduler.adopted == [("same", 2)])
    stack.scheduler.resume()
    await client.read(again)
    assert client.positions == [8]


async def test_a_call_that_goes_on_from_a_token_needs_a_seed(stack):
    error = await error_of(stack.generate(request_id="r", from_token_by_index=[3]))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "sampling.seed")
    fields = {"request_id": "r", "sampling": {"max_tokens": 8, "seed": 1}}
    error = await error_of(stack.generate(from_token_by_index=[9], **fields))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "from_token_by_index")


async def test_an_unknown_request_is_not_found(stack):
    error = await error_of(stack.resume("nobody", 0))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST")


async def test_a_position_that_cannot_be_is_refused(stack):
    stack.scheduler.is_paced = False
    call = stack.generate(request_id="r", sampling={"max_tokens": 8, "n": 2})
    await stack.until(lambda: len(stack.scheduler.live) == 2)
    for positions in ((9,), (0, 9), (1, 2, 3)):
        error = await error_of(stack.resume("r", *positions))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert error.field in {"from_token", "from_token_by_index"}
    stack.scheduler.resume()
    assert await stack.rest(call)


async def test_a_request_that_is_resumed_before_it_is_sent_keeps_its_place(stack):
    stack.scheduler.set_workers(worker(max_num_seqs=1, num_free_kv_blocks=0))
    await stack.until(lambda: stack.router.pool.reports()[0].num_free_kv_blocks == 0)
    stack.scheduler.is_paced = False
    calls = [stack.generate(request_id=f"r-{number}") for number in range(12)]
    await stack.until(lambda: len(stack.router.live) == 12)
    queued = [c.request_id for c in stack.router._dispatcher.queue]
    again = stack.resume(queued[0], 0)
    await stack.until(lambda: stack.router.calls.get(queued[0]).request.is_taken_up)
    assert stack.router.num_queued == len(queued)
    calls[int(queued[0].removeprefix("r-"))] = again
    stack.scheduler.set_workers(worker())
    stack.scheduler.resume()
    await asyncio.gather(*map(stack.rest, calls))
    sent = [s.request_id for s in stack.scheduler.submissions]
    assert sent.index(queued[0]) == len(sent) - len(queued)


async def test_a_repeated_call_attaches_and_what_it_repeats_is_told(stack):
    stack.scheduler.is_paced = False
    first = stack.generate(request_id="same")
    await stack.until(lambda: stack.scheduler.live)
    stack.scheduler.step(3)
    await first.read()
    second = stack.generate(request_id="same")
    error = await error_of(first)
    assert (error.code, error.reason) == (grpc.StatusCode.ABORTED, "RESUMED_ELSEWHERE")
    await stack.until(lambda: stack.scheduler.adopted == [("same", 2)])
    stack.scheduler.resume()
    messages = await stack.rest(second)
    assert sum(len(o.token_ids) for m in messages for o in m.outputs) == 8
    assert not stack.scheduler.cancellations
    metadata = dict(await second.trailing_metadata())
    assert metadata["x-headrace-recoveries"] == "1"


async def test_a_kept_request_goes_on_without_its_caller_and_is_resumed(stack):
    stack.scheduler.is_paced = False
    call = stack.generate(request_id="kept", keep_on_disconnect=True)
    await stack.until(lambda: stack.scheduler.live)
    call.cancel()
    await stack.until(lambda: not stack.router.calls.get("kept").request.has_reader)
    stack.scheduler.step(100)
    await stack.until(lambda: not stack.router.num_in_flight)
    assert stack.router.num_live == 1
    messages = await stack.rest(stack.resume("kept", 2))
    assert messages[0].outputs[0].first_token_position == 2
    assert sum(len(o.token_ids) for m in messages for o in m.outputs) == 6
    assert len(stack.scheduler.submissions) == 1


async def test_a_kept_answer_gives_its_id_to_another_message(stack):
    call = stack.generate(request_id="kept", keep_on_disconnect=True)
    stack.scheduler.is_paced = False
    await stack.until(lambda: stack.router.calls.get("kept"))
    call.cancel()
    await stack.until(lambda: not stack.router.calls.get("kept").request.has_reader)
    assert (await error_of(stack.generate("other", request_id="kept"))).reason == (
        "DUPLICATE_REQUEST_ID"
    )
    stack.scheduler.resume()
    await stack.until(lambda: stack.router.calls.get("kept").request.is_finished)
    assert await stack.answer("other", request_id="kept")
    assert stack.router.calls.get("kept") is None


async def test_a_kept_request_does_not_end_with_the_deadline_of_its_call(stack):
    stack.scheduler.is_paced = False
    call = stack.generate(request_id="kept", keep_on_disconnect=True, timeout=0.3)
    assert (await error_of(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    await stack.until(lambda: not stack.router.calls.get("kept").request.has_reader)
    assert stack.router.calls.get("kept").request.deadline is None
    stack.scheduler.resume()
    assert await stack.rest(stack.resume("kept", 0))


@pytest.mark.parametrize("has_ended", [True, False])
async def test_a_kept_request_that_nobody_resumes_ends(has_ended):
    async with running_stack(recovery={"orphan_ttl_s": 0.2}) as stack:
        stack.scheduler.is_paced = False
        call = stack.generate(request_id="kept", keep_on_disconnect=True)
        await stack.until(lambda: stack.scheduler.live)
        call.cancel()
        await stack.until(lambda: not stack.router.calls.get("kept").request.has_reader)
        if has_ended:
            stack.scheduler.step(100)
        await stack.until(lambda: not stack.router.num_live)
        await stack.until(lambda: not stack.scheduler.live)
        assert len(stack.scheduler.cancellations) == (not has_ended)
        assert (await error_of(stack.resume("kept", 0))).code is grpc.StatusCode.NOT_FOUND


async def test_a_kept_request_waits_when_much_of_it_is_unread_even_where_slow_clients_are_cut():
    streams = {"max_unread_tokens": 4, "slow_client": "cut", "max_pause_s": 0.05}
    async with running_stack(streams=streams) as stack:
        stack.scheduler.is_paced = False
        call = stack.generate(request_id="kept", keep_on_disconnect=True)
        await stack.until(lambda: stack.scheduler.live)
        call.cancel()
        await stack.until(lambda: not stack.router.calls.get("kept").request.has_reader)
        stack.scheduler.step(5)
        await stack.until(lambda: stack.scheduler.pauses == [("kept", True)])
        request = stack.router.calls.get("kept").request
        await stack.until(lambda: request.paused_s > 0.1)
        assert stack.scheduler.live
        rest = stack.resume("kept", 5)
        await stack.until(lambda: stack.scheduler.adopted)
        stack.scheduler.resume()
        assert await stack.rest(rest)


async def test_a_request_to_be_finished_in_any_case_does_not_wait_for_a_reader():
    async with running_stack(streams={"max_unread_tokens": 2}) as stack:
        stack.scheduler.is_paced = False
        always = inference_pb2.GenerateRequest.RECOVER_ALWAYS
        call = stack.generate(request_id="kept", keep_on_disconnect=True, recover=always)
        await stack.until(lambda: stack.scheduler.live)
        stack.scheduler.step(1)
        call.cancel()
        await stack.until(lambda: not stack.router.calls.get("kept").request.has_reader)
        stack.scheduler.step(6)
        stack.scheduler.step(1)
        await stack.until(lambda: not stack.router.num_in_flight)
        assert not stack.scheduler.pauses
        assert await stack.rest(stack.resume("kept", 0))


async def test_a_request_that_moved_ends_its_call_and_is_cancelled_nowhere(stack):
    stack.scheduler.is_paced = False
    call = stack.generate(request_id="r", sampling={"max_tokens": 8, "n": 3})
    await stack.until(lambda: len(stack.scheduler.live) == 3)
    stack.scheduler.step(2)
    await call.read()
    [connection] = stack.scheduler.connections
    handles = list(connection.live)
    connection.live.clear()
    connection.outbox.put_nowait(scheduler_pb2.SchedulerMessage(moved=handles))
    assert (await error_of(call)).reason == "RESUMED_ELSEWHERE"
    assert not stack.scheduler.cancellations
