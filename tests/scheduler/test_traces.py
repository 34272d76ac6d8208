"""The spans of requests in the scheduler, as a collector gets them over OTLP."""

import asyncio
import itertools

import pytest

from headrace.service import telemetry
from headrace.v1 import scheduler_pb2
from scheduler.config import SchedulerSettings
from scheduler.traces import STEPS_PER_SPAN
from tests.headrace.otlp_receiver import OtlpReceiver
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until

TRACE_ID, CALLER_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{CALLER_ID}-01", f"00-{'1' * 32}-{CALLER_ID}-00"
ELDER, YOUNGER = list(range(20, 28)), list(range(30, 38))


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    receiver = OtlpReceiver()
    yield receiver
    receiver.stop()


@pytest.fixture
def exported(receiver):
    """Ends the export; what came, by the time at which each span began."""
    traces = telemetry.setup("scheduler", receiver.endpoint)

    def end():
        traces.shutdown()
        return sorted(receiver.spans, key=lambda span: span.begin_unix_ns)

    yield end
    traces.shutdown()


def children(spans, parent, *names):
    return [s for s in spans if s.parent_id == parent.span_id and s.name in names]


async def test_each_residency_is_a_span_with_the_reason_of_its_end(exported):
    # 16 blocks of 4 tokens hold 64 of the 96 tokens that the two need: the younger gives way, and
    # has many tokens to go when the elder ends.
    worker = FakeGpuWorker(num_kv_blocks=16, max_num_seqs=4)
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings()) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            worker.hold()
            elder = await router.submit(ELDER, 30, traceparent=UNSAMPLED)
            younger = await router.submit(YOUNGER, 50, traceparent=SAMPLED)
            await worker.release()
            await router.finished(elder)
            worker.hold()
            await router.pause(younger)
            await until(lambda: scheduler.pool._workers[0].engine.num_paused)
            num_begun = worker.num_steps_begun
            await router.pause(younger, paused=False)
            await worker.release(1)
            await worker.step_begun(num_begun + 1)
            await worker.kill()
            await worker.start()
            await worker.release()
            assert await router.finished(younger) == [expected_tokens(YOUNGER, 50)]
    spans = exported()
    # Of the request that is not sampled there is nothing.
    assert {span.trace_id for span in spans} == {TRACE_ID}
    (schedule,) = [span for span in spans if span.name == "schedule"]
    assert schedule.parent_id == CALLER_ID
    assert schedule.attributes["gen_ai.response.finish_reasons"] == ["length_capped"]
    assert schedule.attributes["gen_ai.usage.output_tokens"] == 50
    stages = children(spans, schedule, "wait", "residency")
    assert [(stage.name, stage.attributes["headrace.end"]) for stage in stages] == [
        ("wait", "admitted"),
        ("residency", "preempted"),
        ("wait", "admitted"),
        ("residency", "paused"),
        ("wait", "admitted"),
        ("residency", "lost"),
        ("wait", "admitted"),
        ("residency", "length_capped"),
    ]
    # They follow each other without gaps, from the submission to the end.
    times = [(stage.begin_unix_ns, stage.end_unix_ns) for stage in stages]
    assert all(begin <= end for begin, end in times)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    preempted, paused = stages[1].attributes, stages[3].attributes
    assert preempted["headrace.preempted_by"] == "r0-0"
    assert preempted["headrace.num_lost_tokens"] >= len(YOUNGER)
    assert paused["headrace.num_lost_tokens"] >= len(YOUNGER)
    waits = [stage.attributes.get("headrace.wait.reason") for stage in stages[::2]]
    assert waits == [None, "preempted", "client", "worker_lost"]
    # While it waited for the elder, the scheduler said why; each reason is told once.
    reasons = [
        facts["headrace.wait.reason"]
        for stage in stages[::2]
        for name, facts in stage.events
        if name == "passed over"
    ]
    assert {"blocks"} <= set(reasons) <= {"blocks", "preemption", "budget"}
    assert len(reasons) <= 4
    # Each admission's step has a span, and so may a later one; the worker is told of them.
    for stage in stages[1::2]:
        steps = children(spans, stage, "step")
        assert steps
        assert steps[0].attributes["headrace.sampled_because"] == "admission"
        assert [name for name, _ in stage.events].count("step") == len(steps)
    told = [plan.traceparent for plan in worker.plans if plan.traceparent]
    steps = [span for span in spans if span.name == "step"]
    assert told == [f"00-{TRACE_ID}-{step.span_id}-01" for step in steps]
    lost = [step for step in steps if step.status == 2]
    assert [step.attributes["error.type"] for step in lost] == ["worker_lost"]
    assert lost[0].parent_id == stages[5].span_id


async def test_a_step_of_several_traced_requests_is_linked_with_each(exported):
    worker = FakeGpuWorker(num_kv_blocks=256)
    await worker.start()
    other = f"00-{'2' * 32}-{CALLER_ID}-01"
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            submissions = [
                router.submission(YOUNGER, 2 * STEPS_PER_SPAN, traceparent=traceparent)
                for traceparent in (SAMPLED, other, UNSAMPLED, "")
            ]
            await router.send(submissions=submissions)
            await router.finished(*(s.handle for s in submissions))
    spans = exported()
    residencies = {s.trace_id: s for s in spans if s.name == "residency"}
    assert set(residencies) == {TRACE_ID, "2" * 32}
    first, second = residencies[TRACE_ID], residencies["2" * 32]
    steps = [span for span in spans if span.name == "step"]
    assert {step.parent_id for step in steps} == {first.span_id}
    assert {step.links for step in steps} == {(second.span_id,)}
    assert second.links == tuple(step.span_id for step in steps)
    # One for the admission, and one in 64 of the 128 others.
    because = [step.attributes["headrace.sampled_because"] for step in steps]
    assert because[0] == "admission"
    assert set(because[1:]) == {"interval"}
    assert 2 <= len(because) <= 4
    assert [name for name, _ in first.events] == ["step"] * len(steps)
    _, facts = first.events[-1]
    assert (facts["headrace.num_tokens"], facts["headrace.num_computed_tokens"] > 60) == (1, True)


@pytest.mark.parametrize(
    ("reason", "error_type", "status"),
    [
        (scheduler_pb2.CANCEL_REASON_ABORTED, "aborted", 0),
        (scheduler_pb2.CANCEL_REASON_DEADLINE, "deadline", 2),
    ],
)
async def test_an_abort_is_no_error_and_a_missed_deadline_is(exported, reason, error_type, status):
    worker = FakeGpuWorker()
    await worker.start()
    worker.hold()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(YOUNGER, 20, traceparent=SAMPLED)
            await worker.step_begun(1)
            await router.cancel(handle, reason=reason)
            await worker.release()
            await router.finished(handle)
    spans = exported()
    for name in ("schedule", "residency"):
        (span,) = [span for span in spans if span.name == name]
        assert (span.attributes["error.type"], span.status) == (error_type, status)
    assert [span.status for span in spans if span.name == "step"] == [0]


async def test_a_request_that_fails_in_the_worker_is_an_error(exported):
    worker = FakeGpuWorker()
    await worker.start()
    worker.failing_ids = {"r0-0"}
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            await router.finished(await router.submit(YOUNGER, 20, traceparent=SAMPLED))
    spans = await asyncio.to_thread(exported)
    (schedule,) = [span for span in spans if span.name == "schedule"]
    assert (schedule.attributes["error.type"], schedule.status) == ("error", 2)
