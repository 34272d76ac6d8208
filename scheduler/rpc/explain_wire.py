"""Converts request histories from and to headrace.v1 messages."""

from collections.abc import Sequence

from headrace.v1 import inference_pb2
from scheduler.core.explain import EventKind, HistoryEvent, RequestExplanation
from scheduler.core.time_spent import SpentBy, parts
from scheduler.past import MAX_EVENTS

_MAX_DETAIL_CHARS = 500
_KINDS = {kind.value: kind for kind in EventKind}


def history_of(messages: Sequence[inference_pb2.ExplainEvent]) -> tuple[HistoryEvent, ...]:
    """The last entries of a history under earlier epochs; kinds of a later version are left out."""
    return tuple(
        HistoryEvent(
            first_step=message.first_step,
            last_step=message.last_step,
            kind=_KINDS[message.kind],
            time=message.time_unix_s,
            detail=message.detail[:_MAX_DETAIL_CHARS],
            num_tokens=message.num_tokens,
            queue_position=message.queue_position if message.HasField("queue_position") else None,
            duration_s=message.duration_s,
            num_needed_blocks=message.num_needed_blocks,
            num_free_blocks=message.num_free_blocks,
        )
        for message in messages[-MAX_EVENTS:]
        if message.kind in _KINDS
    )


def explain_response(explanation: RequestExplanation) -> inference_pb2.ExplainResponse:
    """A request's history for its caller."""
    return inference_pb2.ExplainResponse(
        request_id=explanation.request_id,
        events=[
            inference_pb2.ExplainEvent(
                first_step=event.first_step,
                last_step=event.last_step,
                kind=event.kind.value,
                detail=event.detail,
                num_tokens=event.num_tokens,
                queue_position=event.queue_position,
                time_unix_s=event.time,
                duration_s=event.duration_s,
                num_needed_blocks=event.num_needed_blocks,
                num_free_blocks=event.num_free_blocks,
            )
            for event in explanation.events
        ],
        steps_waited_by_cause={
            reason.name: num_steps
            for reason, num_steps in explanation.steps_waited_by_cause.items()
        },
        recomputed_tokens=explanation.num_recomputed_tokens,
        cached_tokens=explanation.num_cached_tokens,
        num_preemptions=explanation.num_preemptions,
        breakdown=_breakdown(explanation.spent_s),
        total_s=sum(explanation.spent_s.values()),
        begin_time_unix_s=explanation.began,
    )


def _breakdown(spent_s: SpentBy) -> list[inference_pb2.StageTime]:
    return [
        inference_pb2.StageTime(stage=stage, cause=cause, seconds=seconds)
        for stage, cause, seconds in parts(spent_s)
    ]
