"""Writes status records and spans of requests. The token path never waits for them."""

from collections.abc import Callable, Sequence

from opentelemetry.trace import Span

from headrace.service import telemetry
from headrace.status.records import Update
from headrace.status.states import State
from headrace.status.store import StatusStore
from scheduler.core.plan import FinishedRequest, RequestStatus, StepPlan
from scheduler.requests import LiveRequest


class Journal:
    """Status records and spans of all engines of the process."""

    def __init__(
        self, store: StatusStore, scheduler_id: str, *, clock: Callable[[], float]
    ) -> None:
        """clock gives seconds since the epoch."""
        self._store = store
        self._scheduler_id = scheduler_id
        self._clock = clock
        self._spans: dict[int, Span] = {}

    @property
    def num_open(self) -> int:
        """Spans of requests that have not ended."""
        return len(self._spans)

    def submitted(self, request: LiveRequest, worker_id: str) -> None:
        """A worker's engine took the request, for the first time or after its worker was lost."""
        if not request.is_traced:
            return
        if (span := self._spans.get(request.key)) is not None:
            span.add_event("moved", {"worker_id": worker_id})
            return
        submission = request.submission
        self._spans[request.key] = telemetry.begin_span(
            "schedule",
            submission.traceparent,
            {
                telemetry.RESPONSE_ID: submission.request_id,
                telemetry.REQUEST_MODEL: submission.model,
                telemetry.USAGE_INPUT_TOKENS: len(submission.prompt_token_ids),
                "worker_id": worker_id,
            },
        )

    def admitted(self, request: LiveRequest, num_cached_tokens: int, worker_id: str) -> None:
        """The request was admitted, for the first time or again."""
        self._record(request, State.RUNNING, worker_id=worker_id)
        if (span := self._spans.get(request.key)) is not None:
            span.add_event("admitted", {telemetry.USAGE_CACHED_TOKENS: num_cached_tokens})

    def taken_over(self, request: LiveRequest) -> None:
        """Another router has the request, under a greater epoch."""
        request.is_superseded = False
        if request.is_admitted:
            self._record(request, State.RUNNING)
        if (span := self._spans.get(request.key)) is not None:
            span.add_event("taken over")

    def preempted(self, request: LiveRequest) -> None:
        """The request was preempted."""
        self._record(request, State.PREEMPTED)
        if (span := self._spans.get(request.key)) is not None:
            span.add_event("preempted")

    def paused(self, request: LiveRequest) -> None:
        """The request was paused, because its client does not read, and has no blocks."""
        self._record(request, State.PAUSED)
        if (span := self._spans.get(request.key)) is not None:
            span.add_event("paused")

    def finished(
        self, request: LiveRequest, facts: FinishedRequest, message: str, num_generated: int
    ) -> None:
        """The request ended with num_generated tokens."""
        state = State(facts.status.name)
        self._record(request, state, detail=message, completion_tokens=num_generated)
        if (span := self._spans.pop(request.key, None)) is not None:
            reason = facts.status.name.lower()
            span.set_attribute(telemetry.RESPONSE_FINISH_REASONS, [reason])
            span.set_attribute(telemetry.USAGE_OUTPUT_TOKENS, num_generated)
            if facts.status is RequestStatus.ERROR:
                span.set_attribute(telemetry.ERROR_TYPE, reason)
            span.end()

    def begin_step(self, plan: StepPlan, placed: Sequence[LiveRequest]) -> Span | None:
        """A span for a step that places traced requests in rows; the caller ends it.

        It hangs under the first of them and is linked to the others. Later steps of theirs have
        no span: a trace that grew with every token would tell less, not more.
        """
        spans = [self._spans[request.key] for request in placed if request.is_traced]
        if not spans:
            return None
        return telemetry.begin_span(
            "step",
            telemetry.traceparent_of(spans[0]),
            {
                "step_id": plan.step_id,
                "num_reqs": plan.num_reqs,
                "num_scheduled_tokens": int(plan.num_scheduled_tokens.sum()),
            },
            links=[telemetry.traceparent_of(span) for span in spans[1:]],
        )

    def _record(
        self,
        request: LiveRequest,
        state: State,
        *,
        worker_id: str | None = None,
        detail: str | None = None,
        completion_tokens: int | None = None,
    ) -> None:
        if not self._store.is_configured or request.is_superseded:
            return
        self._store.record(
            Update(
                request_id=request.submission.request_id,
                state=state,
                time_unix_s=self._clock(),
                epoch=request.submission.epoch,
                create_time_unix_s=request.submission.arrival_time or None,
                detail=detail,
                completion_tokens=completion_tokens,
                scheduler_id=self._scheduler_id,
                worker_id=worker_id,
            )
        )
