"""Histories that follow a request from worker to worker and from router to router."""

import numpy as np
import pytest

from headrace.service.columns import pack_int32
from headrace.v1 import inference_pb2
from scheduler.core.explain import EventKind, HistoryEvent, RequestExplanation
from scheduler.core.plan import RequestStatus, WaitReason
from scheduler.past import MAX_EVENTS, EndedPasts, joined, nothing, with_events
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import FakeRouter, router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture
async def worker():
    worker = FakeGpuWorker()
    await worker.start()
    yield worker
    await worker.kill()


async def explained(router: FakeRouter, request_id: str) -> inference_pb2.ExplainResponse:
    return await router.stub.Explain(inference_pb2.ExplainRequest(request_id=request_id))


def kinds(response: inference_pb2.ExplainResponse) -> list[str]:
    return [event.kind for event in response.events if event.kind != "WAITED"]


async def test_a_history_goes_on_after_a_lost_worker(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            for _ in range(8):
                await router.finished(await router.submit(PROMPT, 2))
            handle = await router.submit(PROMPT, 100)
            await router.has_tokens(handle, 5)
            await worker.kill()
            await until(lambda: len(scheduler.pool._stranded) > 0)
            stranded = await explained(router, "r0-8")
            assert kinds(stranded) == ["ADDED", "ADMITTED", "SCHEDULED", "LOST"]
            scheduled, lost = stranded.events[-2:]
            assert lost.detail == f"its worker w0 was lost at step {lost.first_step}"
            assert lost.first_step >= scheduled.last_step
            await worker.start()
            await router.finished(handle)
            ended = await explained(router, "r0-8")
            first = ["ADDED", "ADMITTED", "SCHEDULED", "LOST"]
            assert kinds(ended)[:4] == first
            assert sorted(kinds(ended)[4:]) == sorted(
                ["ADDED", "RECOVERED", "ADMITTED", "SCHEDULED", "FINISHED"]
            )
            recovered = next(event for event in ended.events if event.kind == "RECOVERED")
            admitted = [event for event in ended.events if event.kind == "ADMITTED"][-1]
            assert recovered.first_step == admitted.first_step
            num_tokens = int(recovered.detail.split(" of its ")[1].split()[0])
            assert num_tokens >= len(PROMPT) + 5
            assert ended.recomputed_tokens == num_tokens


async def test_a_history_tells_of_the_routers_that_took_the_request_over(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            first = await one.submit(PROMPT, 100, request_id="x")
            await one.has_tokens(first, 5)
            await other.finished(await other.submit(PROMPT, 100, request_id="x", epoch=2))
            ended = await explained(other, "x")
            (resumed,) = [event for event in ended.events if event.kind == "RESUMED"]
            assert resumed.detail == "taken over by router b under epoch 2, and goes on"
            assert kinds(ended)[-1] == "FINISHED"


async def test_a_history_of_another_scheduler_comes_with_the_submission(worker):
    history = [
        inference_pb2.ExplainEvent(kind="SCHEDULED", first_step=3, last_step=9, time_unix_s=5),
        inference_pb2.ExplainEvent(kind="TELEPORTED"),
        inference_pb2.ExplainEvent(kind="LOST", detail="its scheduler s1 was lost", time_unix_s=6),
    ]
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            before = np.array(expected_tokens(PROMPT, 2), dtype=np.int32)
            handle = await router.submit(
                *(PROMPT, 5),
                request_id="x",
                epoch=2,
                history=history,
                generated_token_ids=pack_int32(before),
            )
            await router.finished(handle)
            ended = await explained(router, "x")
            assert kinds(ended)[:3] == ["SCHEDULED", "LOST", "RESUMED"]
            assert "RECOVERED" in kinds(ended)
            assert ended.recomputed_tokens == len(PROMPT) + 2
            assert ended.events[1].detail == "its scheduler s1 was lost"
            # The id is used again: that request has no past.
            later = await router.submit(PROMPT, 5, request_id="x", arrival_time_unix_s=9)
            await router.finished(later)
            assert kinds(await explained(router, "x"))[0] == "ADDED"


def event(time: float, kind: EventKind = EventKind.SCHEDULED) -> HistoryEvent:
    return HistoryEvent(0, 0, kind, time, "")


def history_with(*times: float, **fields: object) -> RequestExplanation:
    values = {
        "request_id": "x",
        "status": RequestStatus.RUNNING,
        "events": tuple(event(time) for time in times),
        "steps_waited_by_cause": {},
        "num_granted_tokens": 0,
        "num_recomputed_tokens": 0,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
        "queue_position": None,
        "num_events_left_out": 0,
    }
    return RequestExplanation(**(values | fields))


def test_the_middle_of_a_long_history_is_left_out():
    long = with_events(nothing("x"), [event(float(i)) for i in range(MAX_EVENTS + 30)])
    assert len(long.events) == MAX_EVENTS
    assert long.num_events_left_out == 30
    assert (long.events[0].time, long.events[-1].time) == (0.0, MAX_EVENTS + 29)
    assert with_events(long, [event(1000.0)]).num_events_left_out == 31


def test_two_histories_make_one_in_order_of_time_with_the_sums_of_both():
    budget, blocks = WaitReason.BUDGET, WaitReason.BLOCKS
    past = history_with(
        1.0,
        4.0,
        steps_waited_by_cause={budget: 2},
        num_granted_tokens=20,
        num_recomputed_tokens=7,
        num_cached_tokens=3,
        num_preemptions=1,
    )
    now = history_with(
        2.0,
        5.0,
        steps_waited_by_cause={budget: 1, blocks: 4},
        num_recomputed_tokens=5,
        num_cached_tokens=9,
        queue_position=2,
    )
    both = joined(past, now)
    assert [entry.time for entry in both.events] == [1.0, 2.0, 4.0, 5.0]
    assert both.steps_waited_by_cause == {budget: 3, blocks: 4}
    assert (both.num_recomputed_tokens, both.num_preemptions) == (12, 1)
    # Those of the first admission.
    assert (both.num_cached_tokens, both.queue_position) == (3, 2)


def test_a_bounded_number_of_pasts_of_ended_requests_is_kept():
    pasts = EndedPasts(max_kept=2)
    for name in ("a", "b", "a", "c"):
        pasts.keep(name, nothing(name))
    assert [pasts.get(name) is not None for name in ("a", "b", "c")] == [True, False, True]
    pasts.keep("a", None)
    assert pasts.get("a") is None
