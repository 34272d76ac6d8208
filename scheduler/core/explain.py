"""Request histories: what the scheduler did with each request, and why.

Only changes are recorded (the cause of a wait, an admission, a preemption, the end), so a decoding
request costs nothing per step. A history is bounded, and kept for a while after the request ended.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from scheduler.core.plan import PassedOver, RequestStatus, WaitReason
from scheduler.core.time_spent import SpentBy, Stage, StageClock

MAX_FIRST_EVENTS = 16
MAX_LAST_EVENTS = 48
MAX_KEPT_HISTORIES = 4096


class EventKind(Enum):
    """Kinds of timeline entries."""

    ADDED = "ADDED"
    WAITED = "WAITED"
    ADMITTED = "ADMITTED"
    SCHEDULED = "SCHEDULED"
    PREEMPTED = "PREEMPTED"
    PAUSED = "PAUSED"
    CONTINUED = "CONTINUED"
    # Of earlier workers and routers; no core makes these entries.
    LOST = "LOST"
    RECOVERED = "RECOVERED"
    RESUMED = "RESUMED"
    FINISHED = "FINISHED"


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """An entry of a timeline: its steps, the time of its first step, a sentence, computed tokens.

    queue_position counts from 0; None for entries that are not waits. duration_s is 0 for an entry
    that is a moment. The blocks are those that a wait needed and found free, or that a preemption
    was for.
    """

    first_step: int
    last_step: int
    kind: EventKind
    time: float
    detail: str
    num_tokens: int = 0
    queue_position: int | None = None
    duration_s: float = 0.0
    num_needed_blocks: int = 0
    num_free_blocks: int = 0


@dataclass(frozen=True, slots=True)
class RequestExplanation:
    """A request's timeline, oldest entry first, and its sums.

    num_recomputed_tokens: computed tokens lost to preemptions and pauses. num_granted_tokens:
    computed tokens, including those in flight, without rejected drafts. num_events_left_out:
    entries dropped from the middle of a long timeline. spent_s is the time from began to until, on
    the caller's clock, by stage.
    """

    request_id: str
    status: RequestStatus
    events: tuple[HistoryEvent, ...]
    steps_waited_by_cause: dict[WaitReason, int]
    num_granted_tokens: int
    num_recomputed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    queue_position: int | None
    num_events_left_out: int
    spent_s: SpentBy = field(default_factory=dict)
    began: float = 0.0
    until: float = 0.0


# (kind, first step, last step, time, duration, the arguments of the kind's function in _SENTENCES)
_Entry = tuple[EventKind, int, int, float, float, tuple[Any, ...]]


class History:
    """A request's history so far; sentences are made only when it is explained."""

    __slots__ = (
        "_admitted",
        "_clock",
        "_first_entries",
        "_last_entries",
        "_num_entries",
        "_steps_waited",
        "_wait",
        "_wait_reason",
        "end",
        "num_cached_tokens",
        "num_chunks",
        "num_granted_tokens",
        "num_held_steps",
        "num_preemptions",
        "num_recomputed_tokens",
        "request_id",
    )

    def __init__(
        self,
        request_id: str,
        step: int,
        now: float,
        position: int,
        *,
        is_recovering: bool = False,
    ) -> None:
        """is_recovering: the request had begun on a worker that was lost."""
        self.request_id = request_id
        reason = WaitReason.BEHIND_HEAD
        self._clock = StageClock(Stage.RECOVERED if is_recovering else reason, now)
        self._first_entries: list[_Entry] = []
        self._last_entries: deque[_Entry] = deque(maxlen=MAX_LAST_EVENTS)
        self._num_entries = 0
        self._steps_waited: dict[WaitReason, int] = {}
        self.num_granted_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        # Steps since the last admission after which the prefill went on.
        self.num_chunks = 0
        # Steps since the last admission in which other long prefills left no tokens for this
        # request.
        self.num_held_steps = 0
        # (last step, time, final status) once the request ended.
        self.end: tuple[int, float, RequestStatus] | None = None
        # (step, time, cached tokens) of the last admission, while the request runs.
        self._admitted: tuple[int, float, int] | None = None
        # (first step, time, queue position, fact) of the current wait.
        self._wait: tuple[int, float, int, PassedOver | None] | None = (step, now, position, None)
        self._wait_reason = reason
        self._add((EventKind.ADDED, step, step, now, 0.0, (position,)))

    def passed_over(self, fact: PassedOver, step: int, now: float) -> None:
        """A step considered the request, at the head of a queue, without admitting the request."""
        if fact.reason is not self._wait_reason:
            self._end_wait(step, now)
            if self._clock.is_waiting:
                self._clock.enter(fact.reason, now)
            self._begin_wait(fact.reason, step, now, fact)

    def admitted(self, step: int, now: float, num_cached_tokens: int, *, is_resumed: bool) -> None:
        """The request got a row and starts from cached tokens."""
        self._end_wait(step, now)
        if self._clock.is_waiting:
            self._clock.enter(Stage.PREFILL, now)
        if not is_resumed:
            self.num_cached_tokens = num_cached_tokens
        self._add((EventKind.ADMITTED, step, step, now, 0.0, (num_cached_tokens, is_resumed)))
        self._admitted = (step, now, num_cached_tokens)
        self.num_chunks = self.num_held_steps = 0

    def got_token(self, now: float) -> None:
        """The first token since the last admission came."""
        if self._admitted is not None:
            self._clock.enter(Stage.DECODE, now)

    def preempted(
        self, step: int, now: float, num_computed: int, trigger_id: str, num_needed: int
    ) -> None:
        """The request lost its blocks."""
        self._end_run(step, now, num_computed)
        self._clock.enter(Stage.PREEMPTED, now)
        self.num_preemptions += 1
        self.num_recomputed_tokens += num_computed
        facts = (trigger_id, num_needed, num_computed)
        self._add((EventKind.PREEMPTED, step, step, now, 0.0, facts))
        self._begin_wait(WaitReason.PREEMPTION, step, now, None)

    def paused(self, step: int, now: float, num_computed: int) -> None:
        """The client does not read; the request lost its blocks, if it had any."""
        self._end_run(step, now, num_computed)
        self._end_wait(step, now)
        self._clock.enter(Stage.PAUSED, now)
        self.num_recomputed_tokens += num_computed
        self._add((EventKind.PAUSED, step, step, now, 0.0, (num_computed,)))
        self._begin_wait(WaitReason.CLIENT, step, now, None)

    def unpaused(self, step: int, now: float) -> None:
        """The client reads again; the request is queued."""
        self._end_wait(step, now)
        self._add((EventKind.CONTINUED, step, step, now, 0.0, ()))
        self._begin_wait(WaitReason.BEHIND_HEAD, step, now, None)

    def finished(self, step: int, now: float, num_computed: int, status: RequestStatus) -> None:
        """The request reached a final status."""
        self._end_run(step, now, num_computed)
        self._end_wait(step, now)
        self._add((EventKind.FINISHED, step, step, now, 0.0, (status.name,)))
        self.end = (step, now, status)

    def explain(
        self,
        step: int,
        now: float,
        status: RequestStatus,
        num_computed: int,
        queue_position: int | None,
    ) -> RequestExplanation:
        """The history up to a step and a time, including the current wait or run."""
        waited = dict(self._steps_waited)
        entries = [*self._first_entries, *self._last_entries]
        num_granted = self.num_granted_tokens
        wait = self._wait_until(step, now)
        if wait is not None:
            entries.append(wait)
            waited[self._wait_reason] = waited.get(self._wait_reason, 0) + step - wait[1]
        run = self._run_until(step, now, num_computed)
        if run is not None:
            entries.append(run)
            num_granted += run[5][0]
        return RequestExplanation(
            request_id=self.request_id,
            status=status,
            events=tuple(map(_event, entries)),
            steps_waited_by_cause=waited,
            num_granted_tokens=num_granted,
            num_recomputed_tokens=self.num_recomputed_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_preemptions=self.num_preemptions,
            queue_position=queue_position,
            num_events_left_out=(
                self._num_entries - len(self._first_entries) - len(self._last_entries)
            ),
            spent_s=self._clock.spent(now),
            began=self._clock.began,
            until=now,
        )

    def _add(self, entry: _Entry) -> None:
        self._num_entries += 1
        if len(self._first_entries) < MAX_FIRST_EVENTS:
            self._first_entries.append(entry)
        else:
            self._last_entries.append(entry)

    def _begin_wait(
        self, reason: WaitReason, step: int, now: float, fact: PassedOver | None
    ) -> None:
        self._wait_reason = reason
        self._wait = (step, now, 0, fact)

    def _end_wait(self, step: int, now: float) -> None:
        entry = self._wait_until(step, now)
        if entry is None and self._clock.stage is WaitReason.BEHIND_HEAD:
            # The request was queued while a step ran, and the next step took it, or its head.
            self._clock.stage = Stage.NEXT_STEP
        elif entry is not None:
            reason = self._wait_reason
            self._steps_waited[reason] = self._steps_waited.get(reason, 0) + step - entry[1]
            self._add(entry)
        self._wait = None

    def _wait_until(self, step: int, now: float) -> _Entry | None:
        if self._wait is None or step <= self._wait[0]:
            return None
        first, time, position, fact = self._wait
        facts = (self._wait_reason, fact, position)
        return (EventKind.WAITED, first, step - 1, time, max(0.0, now - time), facts)

    def _end_run(self, step: int, now: float, num_computed: int) -> None:
        entry = self._run_until(step, now, num_computed)
        if entry is not None:
            self.num_granted_tokens += entry[5][0]
            self._add(entry)
        self._admitted = None

    def _run_until(self, step: int, now: float, num_computed: int) -> _Entry | None:
        if self._admitted is None:
            return None
        first, time, num_cached = self._admitted
        facts = (max(num_computed - num_cached, 0), self.num_chunks, self.num_held_steps)
        duration_s = max(0.0, now - time)
        return (EventKind.SCHEDULED, first, max(step - 1, first), time, duration_s, facts)


class Ledger:
    """Histories of ended requests; a live request has its own."""

    def __init__(self, max_kept: int = MAX_KEPT_HISTORIES) -> None:
        self._max_kept = max_kept
        self._ended: OrderedDict[str, History] = OrderedDict()

    def keep(self, history: History) -> None:
        """Keep the history of a request that ended; the oldest history is dropped if need be."""
        self._ended[history.request_id] = history
        self._ended.move_to_end(history.request_id)
        if len(self._ended) > self._max_kept:
            self._ended.popitem(last=False)

    def ended(self, request_id: str) -> RequestExplanation | None:
        """The history of a request that ended; None if it is not kept."""
        history = self._ended.get(request_id)
        if history is None:
            return None
        assert history.end is not None, f"{request_id} is kept and has not ended"
        step, now, status = history.end
        return history.explain(step, now, status, 0, None)


def _event(entry: _Entry) -> HistoryEvent:
    kind, first, last, time, duration_s, facts = entry
    num_tokens = facts[0] if kind is EventKind.SCHEDULED else 0
    position = facts[2] if kind is EventKind.WAITED else None
    detail = _SENTENCES[kind](last - first + 1, *facts)
    num_needed = facts[1] if kind is EventKind.PREEMPTED else 0
    num_free = 0
    if kind is EventKind.WAITED and facts[1] is not None:
        num_needed, num_free = facts[1].num_needed_blocks, facts[1].num_free_blocks
    return HistoryEvent(
        *(first, last, kind, time, detail, num_tokens, position, duration_s, num_needed, num_free)
    )


def _waited(num_steps: int, reason: WaitReason, fact: PassedOver | None, _position: int) -> str:
    steps = "1 step" if num_steps == 1 else f"{num_steps} steps"
    blocks = ""
    if fact is not None and fact.num_needed_blocks:
        blocks = f" ({fact.num_needed_blocks} needed, {fact.num_free_blocks} free)"
    return f"waited {steps}: {reason.value}{blocks}"


def _admitted(_num_steps: int, num_cached_tokens: int, is_resumed: bool) -> str:
    word = "resumed" if is_resumed else "admitted"
    return f"{word} with {num_cached_tokens} tokens from the prefix cache"


def _scheduled(_num_steps: int, num_tokens: int, num_chunks: int, num_held_steps: int) -> str:
    prefill = f", prefill in {num_chunks + 1} steps" if num_chunks else ""
    held = f", {num_held_steps} more spent behind other long prefills" if num_held_steps else ""
    return f"computed {num_tokens} tokens{prefill}{held}"


def _preempted(_num_steps: int, trigger_id: str, num_needed: int, num_lost: int) -> str:
    cause = f"{trigger_id} needed {num_needed} KV blocks" if trigger_id else "cache reset"
    return f"preempted: {cause}; {num_lost} computed tokens lost"


def _paused(_num_steps: int, num_lost: int) -> str:
    lost = f"; {num_lost} computed tokens lost" if num_lost else ""
    return f"paused: its client does not read{lost}"


# The sentence of each kind of entry, made from the number of its steps and its facts.
_SENTENCES: dict[EventKind, Callable[..., str]] = {
    EventKind.ADDED: lambda _, num_ahead: f"queued behind {num_ahead} others",
    EventKind.WAITED: _waited,
    EventKind.ADMITTED: _admitted,
    EventKind.SCHEDULED: _scheduled,
    EventKind.PREEMPTED: _preempted,
    EventKind.PAUSED: _paused,
    EventKind.CONTINUED: lambda _: "its client reads again",
    EventKind.FINISHED: lambda _, status_name: f"ended as {status_name}",
}
