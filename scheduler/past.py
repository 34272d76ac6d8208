"""What happened to a request before its present worker and router had it.

A core explains what it did itself. This is the rest: the timelines of lost workers, of earlier
epochs, and what connects them.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from scheduler.core.explain import (
    MAX_FIRST_EVENTS,
    MAX_KEPT_HISTORIES,
    MAX_LAST_EVENTS,
    HistoryEvent,
    RequestExplanation,
)
from scheduler.core.plan import RequestStatus, WaitReason
from scheduler.core.time_spent import SpentBy, Stage, total

MAX_EVENTS = MAX_FIRST_EVENTS + MAX_LAST_EVENTS


def nothing(request_id: str) -> RequestExplanation:
    """The history of a request to which nothing has happened."""
    return RequestExplanation(request_id, RequestStatus.WAITING, (), {}, 0, 0, 0, 0, None, 0)


def with_events(past: RequestExplanation, events: Sequence[HistoryEvent]) -> RequestExplanation:
    """A history with more entries at its end; the middle of a long history is left out."""
    joined = (*past.events, *events)
    if len(joined) <= MAX_EVENTS:
        return replace(past, events=joined)
    num_left_out = past.num_events_left_out + len(joined) - MAX_EVENTS
    bounded = joined[:MAX_FIRST_EVENTS] + joined[-MAX_LAST_EVENTS:]
    return replace(past, events=bounded, num_events_left_out=num_left_out)


def joined(past: RequestExplanation, now: RequestExplanation) -> RequestExplanation:
    """One history of what happened before, and of what the present worker did."""
    # What a router did to the request falls into the time of the worker.
    events = sorted((*past.events, *now.events), key=lambda event: event.time)
    return with_events(
        replace(
            now,
            events=(),
            steps_waited_by_cause=_sum(past.steps_waited_by_cause, now.steps_waited_by_cause),
            num_granted_tokens=past.num_granted_tokens + now.num_granted_tokens,
            num_recomputed_tokens=past.num_recomputed_tokens + now.num_recomputed_tokens,
            num_cached_tokens=(past if past.num_granted_tokens else now).num_cached_tokens,
            num_preemptions=past.num_preemptions + now.num_preemptions,
            num_events_left_out=past.num_events_left_out + now.num_events_left_out,
            spent_s=total(_until(past, now), now.spent_s),
            began=past.began or now.began,
        ),
        events,
    )


def _until(past: RequestExplanation, now: RequestExplanation) -> SpentBy:
    """What a past and the time behind it, in which no worker had the request, were spent on."""
    if not past.until or not now.began:
        return past.spent_s
    return total(past.spent_s, {Stage.RECOVERED: max(0.0, now.began - past.until)})


def _sum(one: Mapping[WaitReason, int], other: Mapping[WaitReason, int]) -> dict[WaitReason, int]:
    return {reason: one.get(reason, 0) + other.get(reason, 0) for reason in {**one, **other}}


class EndedPasts:
    """The pasts of requests that ended lately, for requests that had any."""

    def __init__(self, max_kept: int = MAX_KEPT_HISTORIES) -> None:
        self._max_kept = max_kept
        self._past_by_id: OrderedDict[str, RequestExplanation] = OrderedDict()

    def keep(self, request_id: str, past: RequestExplanation | None) -> None:
        """Keep the past of the last request of an id; the oldest past is dropped if need be."""
        self._past_by_id.pop(request_id, None)
        if past is not None:
            self._past_by_id[request_id] = past
        if len(self._past_by_id) > self._max_kept:
            self._past_by_id.popitem(last=False)

    def get(self, request_id: str) -> RequestExplanation | None:
        """The past of an ended request."""
        return self._past_by_id.get(request_id)
