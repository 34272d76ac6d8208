"""Writes status records and the journal of requests, and tells their traces.

Nothing of that is waited for.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from headrace.status.records import Update
from headrace.status.states import State
from headrace.status.store import StatusStore
from scheduler.core.explain import EventKind, HistoryEvent, RequestExplanation
from scheduler.core.plan import FinishedRequest, Victim
from scheduler.metrics import RequestMeter
from scheduler.past import EndedPasts, joined, nothing, with_events
from scheduler.requests import LiveRequest
from scheduler.token_journal import TokenJournal
from scheduler.traces import RequestTraces
from scheduler.worker import WorkerSpec


class RequestLog:
    """Status records, journal and spans of all engines of the process."""

    def __init__(
        self,
        store: StatusStore,
        scheduler_id: str,
        incarnation: str = "",
        *,
        clock: Callable[[], float],
    ) -> None:
        """incarnation is this process start's; clock gives seconds since the epoch."""
        self._store = store
        self._scheduler_id = scheduler_id
        self._incarnation = incarnation
        self._clock = clock
        self.traces = RequestTraces()
        # Writes tokens, and ends after them; None: no tokens are kept.
        self.journal: TokenJournal | None = None
        # Of ended requests; a live request has its own.
        self.pasts = EndedPasts()
        self.meter = RequestMeter()

    def submitted(self, request: LiveRequest, worker_id: str) -> None:
        """A worker's engine took the request, for the first time or after its worker was lost."""
        self.traces.submitted(request, worker_id)

    def admitted(
        self, request: LiveRequest, num_cached_tokens: int, info: WorkerSpec, step: int
    ) -> None:
        """The request was admitted in a worker's step, for the first time or again."""
        self._record(
            request,
            State.RUNNING,
            worker_id=info.worker_id,
            worker_incarnation=info.incarnation,
            cached_tokens=num_cached_tokens if request.admission is None else None,
        )
        if request.is_recovering:
            self._recovered(request, num_cached_tokens, info.worker_id, step)
        self.traces.admitted(request, num_cached_tokens, info.worker_id, step)

    def lost(
        self, request: LiveRequest, worker_id: str, step: int, done: RequestExplanation | None
    ) -> None:
        """The request's worker was lost at a step, after `done`."""
        past = request.past or nothing(request.submission.request_id)
        request.past = past if done is None else joined(past, done)
        self._note(request, EventKind.LOST, f"its worker {worker_id} was lost at step {step}", step)
        request.is_recovering = request.is_admitted
        self.traces.lost(request, worker_id, step)

    def _recovered(
        self, request: LiveRequest, num_cached_tokens: int, worker_id: str, step: int
    ) -> None:
        num_tokens = len(request.submission.prompt_token_ids) + len(request.generated_token_ids)
        num_again = num_tokens - num_cached_tokens
        self.meter.num_recovered += 1
        self.meter.num_recomputed_tokens += num_again
        self._note(
            request,
            EventKind.RECOVERED,
            f"goes on on {worker_id}, which computes {num_again} of its {num_tokens} tokens again",
            step,
        )
        if request.past is not None:
            num_recomputed = request.past.num_recomputed_tokens + num_again
            request.past = replace(request.past, num_recomputed_tokens=num_recomputed)
        request.is_recovering = False

    def taken_up(self, request: LiveRequest, router_id: str) -> None:
        """A router submitted the request, which has had earlier epochs, as a new request."""
        self.meter.num_taken_up += 1
        submission = request.submission
        if submission.history:
            request.past = with_events(nothing(submission.request_id), submission.history)
        self._note(
            request,
            EventKind.RESUMED,
            f"taken up by router {router_id} under epoch {submission.epoch},"
            f" with {len(submission.generated_token_ids)} tokens",
        )
        # What has generated tokens has run, and what was computed there is computed again here.
        request.is_recovering = len(submission.generated_token_ids) > 0

    def taken_over(self, request: LiveRequest, router_id: str) -> None:
        """Another router has the request, which goes on, under a greater epoch."""
        self.meter.num_taken_up += 1
        if request.is_admitted:
            self._record(request, State.RUNNING)
        epoch = request.submission.epoch
        detail = f"taken over by router {router_id} under epoch {epoch}, and goes on"
        self._note(request, EventKind.RESUMED, detail)
        self.traces.taken_over(request, router_id)

    def _note(self, request: LiveRequest, kind: EventKind, detail: str, step: int = 0) -> None:
        """Add an entry to the request's past."""
        event = HistoryEvent(step, step, kind, self._clock(), detail)
        past = request.past or nothing(request.submission.request_id)
        request.past = with_events(past, [event])

    def preempted(self, request: LiveRequest, victim: Victim) -> None:
        """The request was preempted."""
        self._record(request, State.PREEMPTED)
        self.traces.preempted(request, victim)

    def paused(self, request: LiveRequest, num_lost_tokens: int) -> None:
        """The request was paused, because its client does not read, and lost its blocks."""
        self.meter.num_tokens_lost_to_pauses += num_lost_tokens
        self._record(request, State.PAUSED)
        self.traces.paused(request, num_lost_tokens)

    def finished(
        self, request: LiveRequest, facts: FinishedRequest, message: str, num_generated: int
    ) -> None:
        """The request ended with num_generated tokens."""
        self.meter.num_finished[facts.status] += 1
        self.pasts.keep(request.submission.request_id, request.past)
        if self._store.is_configured:
            self._record_end(request, facts, message, num_generated)
        self.traces.finished(request, facts, message, num_generated)

    def _record_end(
        self, request: LiveRequest, facts: FinishedRequest, message: str, num_generated: int
    ) -> None:
        fields = {
            "detail": message,
            "completion_tokens": num_generated,
            "stop_token_id": facts.stop_token_id,
        }
        state = State(facts.status.name)
        if self.journal is None:
            self._record(request, state, **fields)
        elif request.is_superseded:
            self.journal.forget(request)
        else:
            update = self._update(request, state, **fields)
            self.journal.ended(request, update, facts.output_token_ids)

    def _record(self, request: LiveRequest, state: State, **fields: Any) -> None:
        """Write a change of state; `fields` are an Update's."""
        if self._store.is_configured and not request.is_superseded:
            self._store.record(self._update(request, state, **fields))

    def _update(self, request: LiveRequest, state: State, **fields: Any) -> Update:
        return Update(
            request_id=request.submission.request_id,
            state=state,
            time_unix_s=self._clock(),
            epoch=request.submission.epoch,
            create_time_unix_s=request.submission.arrival_time or None,
            scheduler_id=self._scheduler_id,
            scheduler_incarnation=self._incarnation,
            **fields,
        )
