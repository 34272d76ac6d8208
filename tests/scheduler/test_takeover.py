"""Requests that change their router while they live here."""

import numpy as np
import pytest

from headrace.service.columns import pack_int32
from headrace.v1 import common_pb2, scheduler_pb2
from scheduler.config import SchedulerSettings
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def packed(token_ids) -> bytes:
    return pack_int32(np.array(token_ids, dtype=np.int32))


def num_placed(worker: FakeGpuWorker, request_id: str = "x") -> int:
    """How often a request was given a row: once, unless its KV was computed again."""
    return sum(r.request_id == request_id for plan in worker.plans for r in plan.row_requests)


@DEPTHS
async def test_an_orphan_goes_on_for_the_router_that_takes_it_over(depth):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "gone") as gone:
            handle = await gone.submit(PROMPT, 100, request_id="x")
            await gone.has_tokens(handle, 7)
            worker.hold()
        await until(lambda: not scheduler.switchboard._outboxes)
        async with router_to(scheduler, "next") as router:
            handle = await router.submit(
                PROMPT,
                100,
                request_id="x",
                epoch=2,
                priority=-3,  # routers age it
                generated_token_ids=packed(expected_tokens(PROMPT, 5)),
            )
            await router.has_tokens(handle, 2)
            assert router.received[handle].admitted.worker_id == "w0"
            await worker.release()
            assert await router.finished(handle) == [expected_tokens(PROMPT, 100)[5:]]
            assert router.received[handle].finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert num_placed(worker) == 1


@DEPTHS
async def test_a_live_router_is_told_that_its_request_has_moved(depth):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            # Handles of its own, so that the two routers' handles differ.
            other._num_handles = 7
            first = await one.submit(PROMPT, 150, request_id="x")
            kept = await one.submit([21, 22], 50)
            await one.has_tokens(first, 3)
            taken = await other.submit(PROMPT, 150, request_id="x", epoch=2)
            await one.wait_for(lambda: one.received[first].has_moved)
            assert await other.finished(taken) == [expected_tokens(PROMPT, 150)]
            assert await one.finished(kept) == [expected_tokens([21, 22], 50)]
            # What it says of a handle that is not its own any more concerns nobody.
            await one.cancel(first)
            last = await one.submit([21, 22], 3)
            await one.finished(last)
    assert num_placed(worker) == 1


async def test_a_router_can_take_over_its_own_request():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            first = await router.submit(PROMPT, 100, request_id="x")
            await router.has_tokens(first, 3)
            again = await router.submit(PROMPT, 100, request_id="x", epoch=2)
            await router.wait_for(lambda: router.received[first].has_moved)
            assert await router.finished(again) == [expected_tokens(PROMPT, 100)]
    assert num_placed(worker) == 1


async def test_an_admission_that_no_router_heard_of_is_reported_once():
    worker = FakeGpuWorker()
    await worker.start()
    worker.hold()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            first = await one.submit(PROMPT, 5, request_id="x")
            await worker.step_begun(1)
            # Admitted by a step whose result has not come.
            taken = await other.submit(PROMPT, 5, request_id="x", epoch=2)
            await one.wait_for(lambda: one.received[first].has_moved)
            await worker.release()
            assert await other.finished(taken) == [expected_tokens(PROMPT, 5)]
            assert other.received[taken].admitted is not None
            assert one.received[first].admitted is None


async def test_a_waiting_request_keeps_its_place_when_it_is_taken_over():
    worker = FakeGpuWorker(max_num_seqs=1)
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            runs = await one.submit([31, 32], 40)
            await one.has_tokens(runs, 1)
            worker.hold()
            await one.submit(PROMPT, 5, request_id="x")
            behind = await one.submit([41, 42], 5)
            taken = await other.submit(PROMPT, 5, request_id="x", epoch=2)
            await until(lambda: len(scheduler.switchboard.requests) == 3)
            await worker.release()
            assert await other.finished(taken) == [expected_tokens(PROMPT, 5)]
            assert await one.finished(behind) == [expected_tokens([41, 42], 5)]
    order = [r.request_id for plan in worker.plans for r in plan.row_requests]
    assert order == ["a-0", "x", "a-2"]


@DEPTHS
async def test_a_paused_request_continues_for_its_next_router(depth):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            first = await one.submit(PROMPT, 100, request_id="x")
            await one.has_tokens(first, 5)
            await one.pause(first)
            await until(lambda: scheduler.num_free_blocks() == [worker.num_kv_blocks])
            taken = await other.submit(PROMPT, 100, request_id="x", epoch=2)
            assert await other.finished(taken) == [expected_tokens(PROMPT, 100)]


async def test_a_request_between_two_workers_can_be_taken_over():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            first = await one.submit(PROMPT, 100, request_id="x")
            await one.has_tokens(first, 5)
            await worker.kill()
            await until(lambda: len(scheduler.pool._stranded) > 0)
            taken = await other.submit(PROMPT, 100, request_id="x", epoch=2)
            await other.has_tokens(taken, 5)
            await worker.start()
            assert await other.finished(taken) == [expected_tokens(PROMPT, 100)]


@pytest.mark.parametrize(
    "fields",
    [
        # Tokens that this request never had.
        {"generated_token_ids": packed([500, 501])},
        # More than it has: they came from another scheduler.
        {"generated_token_ids": packed(expected_tokens(PROMPT, 60))},
        # The log probabilities of its tokens are gone.
        {"sampling": common_pb2.SamplingParams(logprobs=1)},
        {"deadline_unix_s": 9e9},
    ],
)
async def test_what_cannot_go_on_is_computed_again(fields):
    worker = FakeGpuWorker()
    await worker.start()
    generated = np.frombuffer(fields.get("generated_token_ids", b""), dtype="<i4").tolist()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            sampling = fields.get("sampling", common_pb2.SamplingParams())
            first = await one.submit(PROMPT, 70, request_id="x", sampling=sampling)
            await one.has_tokens(first, 5)
            worker.hold()
            taken = await other.submit(PROMPT, 70, request_id="x", epoch=2, **fields)
            await one.wait_for(lambda: one.received[first].has_moved)
            await worker.release()
            expected = expected_tokens([*PROMPT, *generated], 70 - len(generated))
            assert await other.finished(taken) == [expected]
    assert num_placed(worker) == 2


async def test_log_probabilities_go_on_for_a_router_that_lacks_none():
    worker = FakeGpuWorker()
    await worker.start()
    sampling = common_pb2.SamplingParams(logprobs=1, prompt_logprobs=1)
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            first = await one.submit(PROMPT, 30, request_id="x", sampling=sampling)
            worker.hold()
            await one.has_tokens(first, 0)
            taken = await other.submit(PROMPT, 30, request_id="x", epoch=2, sampling=sampling)
            await worker.release()
            assert await other.finished(taken) == [expected_tokens(PROMPT, 30)]
            assert len(other.received[taken].logprobs) == 30
            assert len(other.received[taken].prompt_logprobs) == len(PROMPT) - 1


async def test_a_request_that_arrived_later_under_the_same_id_takes_the_id():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            old = await router.submit(PROMPT, 200, request_id="x", epoch=3)
            await router.has_tokens(old, 3)
            worker.hold()
            new = await router.submit([51, 52], 20, request_id="x", arrival_time_unix_s=2.0)
            late = await router.submit(PROMPT, 200, request_id="x", epoch=9)
            assert (await router.refused(late)).reason == scheduler_pb2.REFUSAL_REASON_DUPLICATE
            await worker.release()
            assert await router.finished(new) == [expected_tokens([51, 52], 20)]
            assert router.received[old].has_moved


async def test_of_a_call_that_was_admitted_twice_the_claimed_one_goes_on():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            again = await one.submit(PROMPT, 50, request_id="x", arrival_time_unix_s=2.0)
            await one.has_tokens(again, 3)
            worker.hold()
            claimed = await other.submit(PROMPT, 50, request_id="x", epoch=2)
            await worker.release()
            assert await other.finished(claimed) == [expected_tokens(PROMPT, 50)]
            assert one.received[again].has_moved


async def test_what_ended_before_it_could_be_taken_over_is_computed_from_its_tokens():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            first = await one.submit(PROMPT, 20, request_id="x")
            assert await one.finished(first) == [expected_tokens(PROMPT, 20)]
            generated = packed(expected_tokens(PROMPT, 5))
            taken = await other.submit(
                PROMPT, 20, request_id="x", epoch=2, generated_token_ids=generated
            )
            assert await other.finished(taken) == [expected_tokens(PROMPT, 20)[5:]]
            assert not one.received[first].has_moved


async def test_a_cancelled_request_is_not_taken_over():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            first = await router.submit(PROMPT, 100, request_id="x")
            await router.has_tokens(first, 3)
            again = router.submission(PROMPT, 100, request_id="x", epoch=2)
            await router.send(cancellations=[scheduler_pb2.Cancellation(handle=first)])
            await router.send(submissions=[again])
            (_, tokens) = await router.finished(first, again.handle)
            assert tokens == expected_tokens(PROMPT, 100)
            assert router.received[first].finished.reason == common_pb2.FINISH_REASON_ABORTED
