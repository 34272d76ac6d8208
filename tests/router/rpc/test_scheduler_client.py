"""A scheduler that refuses, goes away or comes back: requests go on, whole and once."""

import asyncio

import grpc
import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, scheduler_pb2
from router.rpc import scheduler_client
from tests.router.fake_scheduler import MODEL, FakeScheduler, Script, worker
from tests.router.stack import running_stack
from tests.router.tiny_models import byte_level_model

TEXT = "hello world, hello world, hello 🎉"
TOKENS = byte_level_model().tokenizer.encode(TEXT, add_special_tokens=False).tolist()


def text_of(messages):
    return "".join(output.text for message in messages for output in message.outputs)


def token_ids_of(messages):
    return [t for message in messages for output in message.outputs for t in output.token_ids]


def says_text(_submission):
    return Script(TOKENS)


async def test_a_lost_schedulers_requests_go_on_elsewhere_without_gap_or_repeat():
    async with FakeScheduler(script=says_text, is_paced=False) as second:
        first = FakeScheduler(script=says_text, is_paced=False)
        await first.start()
        async with running_stack(schedulers=[first, second]) as stack:
            await stack.until(lambda: len(stack.router.pool.reports()) == 2)
            second.set_workers(worker(worker_id="z", max_num_seqs=1))
            calls = [stack.generate(request_id=f"r-{i}", sampling={}) for i in range(4)]
            await stack.until(lambda: len(first.live) + len(second.live) == 4)
            first.step(5)
            second.step(5)
            firsts = [[await call.read()] for call in calls]
            moved = {g.submission.request_id for g in first.live}
            assert moved
            await first.stop()
            await stack.until(lambda: len(second.live) == 4)
            second.resume()
            for call, begin in zip(calls, firsts, strict=True):
                messages = begin + await stack.rest(call)
                assert text_of(messages) == TEXT
                assert token_ids_of(messages) == TOKENS
            again = [s for s in second.submissions if s.epoch == 2]
            assert {s.request_id for s in again} == moved
            for submission in again:
                assert list(memoryview(submission.generated_token_ids).cast("i")) == TOKENS[:5]


async def test_a_request_that_kills_schedulers_fails_and_those_beside_it_do_not():
    def is_killer(submission):
        return submission.request_id == "killer"

    schedulers = [FakeScheduler(script=says_text, is_paced=False) for _ in range(2)]
    for scheduler in schedulers:
        scheduler.dies_of = is_killer
        scheduler.interval_s = 0.002
    async with schedulers[0], schedulers[1], running_stack(schedulers=schedulers) as stack:
        await stack.until(lambda: len(stack.router.pool.reports()) == 2)
        innocents = [
            asyncio.create_task(stack.answer(request_id=f"r-{i}", sampling={}, timeout=60))
            for i in range(8)
        ]
        await stack.until(lambda: sum(len(scheduler.live) for scheduler in schedulers) == 8)
        for scheduler in schedulers:
            scheduler.resume()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stack.answer(request_id="killer", sampling={}, timeout=60)
        assert from_rpc_error(raised.value).reason == "SCHEDULERS_LOST"
        for messages in await asyncio.gather(*innocents):
            assert (text_of(messages), token_ids_of(messages)) == (TEXT, TOKENS)
        assert sum(scheduler.num_deaths for scheduler in schedulers) <= 4


async def test_a_scheduler_that_comes_back_is_used_again():
    scheduler = FakeScheduler(script=says_text)
    await scheduler.start()
    async with running_stack(schedulers=[scheduler]) as stack:
        assert text_of(await stack.answer()) == TEXT
        await scheduler.stop()
        await stack.until(lambda: not stack.router.pool.reports())
        waiting = asyncio.create_task(stack.answer())
        await stack.until(lambda: stack.router.num_queued == 1)
        async with FakeScheduler(script=says_text) as again:
            await again.stop()
            await again.start(scheduler.address)
            assert text_of(await waiting) == TEXT
            assert text_of(await stack.answer()) == TEXT


async def test_requests_wait_for_a_scheduler_that_is_away_and_keep_their_order():
    scheduler = FakeScheduler(script=says_text, is_paced=False)
    await scheduler.start()
    async with running_stack(schedulers=[scheduler]) as stack:
        calls = []
        for number in range(3):
            calls.append(stack.generate(request_id=f"r-{number}"))
            await stack.until(lambda: len(scheduler.submissions) == number + 1)  # noqa: B023
        await scheduler.stop()
        await stack.until(lambda: stack.router.num_queued == 3)
        again = FakeScheduler(script=says_text)
        await again.start(scheduler.address)
        try:
            for call in calls:
                assert text_of([message async for message in call]) == TEXT
            assert [s.request_id for s in again.submissions] == ["r-0", "r-1", "r-2"]
            # The next scheduler's explanation begins with the loss.
            assert [[e.kind for e in s.history] for s in again.submissions] == [["LOST"]] * 3
        finally:
            await again.stop()


@pytest.mark.parametrize("reason", ["NO_WORKER", "WORKER_LOST", "DRAINING"])
async def test_what_a_worker_cannot_take_now_is_sent_again(stack, reason):
    stack.scheduler.script = says_text
    stack.scheduler.refusals = [(reason, "not now")]
    assert text_of(await stack.answer()) == TEXT
    assert [s.epoch for s in stack.scheduler.submissions] == [1, 2]


@pytest.mark.parametrize(
    ("reason", "wrong", "code", "field"),
    [
        ("TOO_LONG", "", grpc.StatusCode.INVALID_ARGUMENT, "text"),
        ("INVALID", "sampling.n", grpc.StatusCode.INVALID_ARGUMENT, "sampling.n"),
        ("INVALID", "prompt_token_ids", grpc.StatusCode.INVALID_ARGUMENT, "text"),
        ("INVALID", "epoch", grpc.StatusCode.INTERNAL, None),
        ("DUPLICATE", "", grpc.StatusCode.ALREADY_EXISTS, None),
        ("UNSPECIFIED", "", grpc.StatusCode.INTERNAL, None),
    ],
)
async def test_what_a_scheduler_will_never_take_is_an_error(stack, reason, wrong, code, field):
    stack.scheduler.refusals = [(reason, f"{wrong}: because", wrong)]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.answer()
    error = from_rpc_error(caught.value)
    assert (error.code, error.field) == (code, field)
    assert error.message.count("because") == 1
    assert error.message.count(field or "because") == 1


async def test_what_is_refused_again_and_again_is_given_up(stack):
    stack.scheduler.refusals = [("NO_WORKER", "not now")] * 100
    call = stack.generate()
    reader = asyncio.ensure_future(stack.rest(call))
    while not reader.done():
        stack.scheduler.set_workers(worker())
        await asyncio.wait([reader], timeout=0.01)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reader
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    stack.scheduler.refusals = []


@pytest.mark.parametrize(
    "update",
    [
        scheduler_pb2.StepUpdate(handles=b"abc"),
        scheduler_pb2.StepUpdate(handles=b"\1\0\0\0"),
        scheduler_pb2.StepUpdate(handles=b"\1\0\0\0", num_new_tokens=b"\2\0\0\0"),
    ],
)
async def test_columns_that_do_not_fit_cost_the_connection_only(stack, update):
    stack.scheduler.script = says_text
    [broken] = stack.scheduler.connections
    broken.outbox.put_nowait(scheduler_pb2.SchedulerMessage(step_update=update))
    await stack.until(lambda: broken not in stack.scheduler.connections)
    await stack.until(stack.router.pool.reports)
    assert text_of(await stack.answer()) == TEXT


async def test_a_draining_scheduler_gets_nothing_new(stack):
    stack.scheduler.is_draining = True
    stack.scheduler.set_workers(worker())
    await stack.until(lambda: not stack.router.pool.ready(MODEL, stack.router.now()))
    waiting = stack.generate()
    await stack.until(lambda: stack.router.num_queued == 1)
    assert not stack.scheduler.submissions
    waiting.cancel()


async def test_unknown_handles_and_finishes_are_skipped(stack):
    stack.scheduler.script = says_text
    update = scheduler_pb2.StepUpdate(
        handles=b"\xff\0\0\0", num_new_tokens=b"\1\0\0\0", token_ids=b"\1\0\0\0"
    )
    update.finished.add(handle=254, reason=common_pb2.FINISH_REASON_STOP)
    update.admitted.add(handle=253)
    [connection] = stack.scheduler.connections
    connection.outbox.put_nowait(scheduler_pb2.SchedulerMessage(step_update=update))
    assert text_of(await stack.answer()) == TEXT
    assert stack.scheduler.connections == [connection]


async def test_a_burst_of_long_prompts_is_sent_in_messages_of_a_size_that_is_taken(stack):
    stack.scheduler.script = says_text
    size = {"max_model_len": 10**6, "num_kv_blocks": 10**6, "num_free_kv_blocks": 10**6}
    stack.scheduler.set_workers(worker(max_num_seqs=0, **size))
    await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 0)
    stack.scheduler.is_paced = False
    calls = [stack.generate(token_ids={"ids": [1] * 150_000}) for _ in range(20)]
    await stack.until(lambda: stack.router.num_queued == 12)
    # All that waits becomes sendable at once: more than gRPC's own limit of 4 MiB a message.
    stack.scheduler.set_workers(worker(**size))
    stack.scheduler.resume()
    for call in calls:
        assert text_of([message async for message in call]) == TEXT
    assert {s.epoch for s in stack.scheduler.submissions} == {1}


async def test_what_comes_close_together_is_sent_in_one_message(stack, monkeypatch):
    monkeypatch.setattr(scheduler_client, "_MESSAGE_GAP_S", 0.3)
    stack.scheduler.script = says_text
    num_before = stack.scheduler.num_messages
    for call in [stack.generate() for _ in range(8)]:
        assert text_of([message async for message in call]) == TEXT
    assert len(stack.scheduler.submissions) == 8
    # The first at once, the others together.
    assert stack.scheduler.num_messages - num_before <= 2
