"""Spans of the requests that their callers trace, and of some of their steps.

Under a request's `schedule` span follow each other its waits and its residencies: a residency is a
stay in a row of a worker, from an admission until the request ends, is preempted or paused, or its
worker is lost. A step that admits traced requests has a span, and so has every 64th step with a
traced request in it: under the residency of the first of them, linked to and from the others'.
Nothing is done for requests that are not sampled, and nothing for each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import Span

from headrace.service import telemetry
from scheduler.core.plan import (
    FinishedRequest,
    Int64Array,
    PassedOver,
    RequestStatus,
    StepPlan,
    Victim,
    WaitReason,
)
from scheduler.requests import LiveRequest

# Of steps that admit no traced request, one in so many has a span.
STEPS_PER_SPAN = 64

WAIT, RESIDENCY = "wait", "residency"
END = "headrace.end"
REASON = "headrace.wait.reason"
STEP_ID = "headrace.step_id"
WORKER_ID = "headrace.worker_id"
NUM_REQS = "headrace.num_reqs"
NUM_TOKENS = "headrace.num_tokens"
NUM_COMPUTED_TOKENS = "headrace.num_computed_tokens"
SAMPLED_BECAUSE = "headrace.sampled_because"


@dataclass(slots=True)
class _Traced:
    """The spans of a live request; `stage` is its wait or its residency of now."""

    schedule: Span
    stage: Span
    is_running: bool = False
    reason: WaitReason | None = None

    def next(self, name: str, end: str, attributes: telemetry.Attributes) -> None:
        """End the stage, for the reason `end`, and begin another one."""
        self.stage.set_attribute(END, end)
        self.stage.end()
        self.stage = telemetry.begin_span(name, self.schedule, attributes)
        self.is_running, self.reason = name == RESIDENCY, None


class RequestTraces:
    """The open spans of all engines' requests, by the requests' keys."""

    def __init__(self) -> None:
        self._open: dict[int, _Traced] = {}

    def __len__(self) -> int:
        return len(self._open)

    def submitted(self, request: LiveRequest, worker_id: str) -> None:
        """A worker's engine took the request, for the first time or after its worker was lost."""
        submission = request.submission
        if not telemetry.is_sampled(submission.traceparent):
            return
        if (traced := self._open.get(request.key)) is not None:
            traced.stage.add_event("moved", {WORKER_ID: worker_id})
            return
        schedule = telemetry.begin_span(
            "schedule",
            submission.traceparent,
            {
                telemetry.RESPONSE_ID: submission.request_id,
                telemetry.REQUEST_MODEL: submission.model,
                telemetry.USAGE_INPUT_TOKENS: len(submission.prompt_token_ids),
                WORKER_ID: worker_id,
                "headrace.epoch": submission.epoch,
            },
        )
        wait = telemetry.begin_span(WAIT, schedule)
        self._open[request.key] = _Traced(schedule, wait)

    def waited(self, passed_over: Sequence[PassedOver]) -> None:
        """A step considered these requests, and admitted none of them."""
        if not self._open:
            return
        for fact in passed_over:
            traced = self._open.get(fact.key)
            if traced is None or traced.is_running or traced.reason is fact.reason:
                continue
            traced.reason = fact.reason
            counts = {"needed_blocks": fact.num_needed_blocks, "free_blocks": fact.num_free_blocks}
            known = {f"headrace.{name}": count for name, count in counts.items() if count}
            traced.stage.add_event("passed over", {REASON: fact.reason.name.lower(), **known})

    def admitted(
        self, request: LiveRequest, num_cached_tokens: int, worker_id: str, step: int
    ) -> None:
        """The request got a row."""
        if (traced := self._open.get(request.key)) is not None:
            facts: dict[str, str | int] = {
                WORKER_ID: worker_id,
                STEP_ID: step,
                telemetry.USAGE_CACHED_TOKENS: num_cached_tokens,
            }
            traced.next(RESIDENCY, "admitted", facts)

    def preempted(self, request: LiveRequest, victim: Victim) -> None:
        """The request lost its blocks to another one."""
        if (traced := self._open.get(request.key)) is not None:
            traced.stage.set_attributes(
                {
                    "headrace.preempted_by": victim.trigger_id,
                    "headrace.needed_blocks": victim.num_needed_blocks,
                    "headrace.num_lost_tokens": victim.num_lost_tokens,
                }
            )
            traced.next(WAIT, "preempted", {REASON: "preempted"})

    def paused(self, request: LiveRequest, num_lost_tokens: int) -> None:
        """The request lost its blocks because its client does not read."""
        if (traced := self._open.get(request.key)) is not None:
            traced.stage.set_attribute("headrace.num_lost_tokens", num_lost_tokens)
            traced.next(WAIT, "paused", {REASON: "client"})

    def lost(self, request: LiveRequest, worker_id: str, step: int) -> None:
        """The request's worker was lost at a step."""
        if (traced := self._open.get(request.key)) is not None:
            facts: dict[str, str | int] = {
                REASON: "worker_lost",
                WORKER_ID: worker_id,
                STEP_ID: step,
            }
            traced.next(WAIT, "lost", facts)

    def taken_over(self, request: LiveRequest, router_id: str) -> None:
        """Another router has the request, which goes on."""
        if (traced := self._open.get(request.key)) is not None:
            traced.stage.add_event("taken over", {"headrace.router_id": router_id})

    def finished(
        self, request: LiveRequest, facts: FinishedRequest, message: str, num_generated: int
    ) -> None:
        """The request ended."""
        if (traced := self._open.pop(request.key, None)) is None:
            return
        reason, span = facts.status.name.lower(), traced.schedule
        traced.stage.set_attribute(END, reason)
        span.set_attribute(telemetry.RESPONSE_FINISH_REASONS, [reason])
        span.set_attribute(telemetry.USAGE_OUTPUT_TOKENS, num_generated)
        if facts.status in _FAILED:
            is_fault = facts.status is not RequestStatus.ABORTED
            for failed in (traced.stage, span):
                telemetry.fail(failed, reason, message or reason, is_fault=is_fault)
        traced.stage.end()
        span.end()

    def begin_step(
        self, plan: StepPlan, keys: Int64Array, placed: Sequence[LiveRequest]
    ) -> Span | None:
        """A span for a step, which the caller ends with its result; None for most steps.

        Args:
            plan: the step.
            keys: [num_reqs] the requests' keys, in the plan's order.
            placed: requests that the plan puts into rows.
        """
        if not self._open:
            return None
        because, wanted = "admission", {request.key for request in placed} & self._open.keys()
        if not wanted and plan.step_id % STEPS_PER_SPAN == 0:
            because, wanted = "interval", self._open.keys() & set(keys.tolist())
        if not wanted:
            return None
        found = [(i, self._open[key]) for i, key in enumerate(keys.tolist()) if key in wanted]
        if not found:
            return None
        (_, first), *others = found
        span = telemetry.begin_span(
            "step",
            first.stage,
            {
                STEP_ID: plan.step_id,
                NUM_REQS: plan.num_reqs,
                NUM_TOKENS: int(plan.num_scheduled_tokens.sum()),
                SAMPLED_BECAUSE: because,
            },
            links=[other.stage for _, other in others],
        )
        for _, other in others:
            telemetry.link(other.stage, span)
        for position, traced in found:
            facts: dict[str, str | int] = {
                STEP_ID: plan.step_id,
                NUM_TOKENS: int(plan.num_scheduled_tokens[position]),
                NUM_COMPUTED_TOKENS: int(plan.num_computed_tokens[position]),
                SAMPLED_BECAUSE: because,
            }
            traced.stage.add_event("step", facts)
        return span


_FAILED = (RequestStatus.ERROR, RequestStatus.DEADLINE, RequestStatus.ABORTED)
