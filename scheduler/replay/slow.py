"""Where the requests of a recorded run waited, from the core's own account of each.

A recording has the time at which each step was planned. A result counts as of that time, so times
are good to one step.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from headrace.types import ExplainEvent, RequestHistory, StageTime
from scheduler.core.explain import RequestExplanation
from scheduler.core.plan import RequestStatus, StepPlan, WaitReason
from scheduler.core.time_spent import Stage, parts
from scheduler.metrics import WorkerMeter
from scheduler.replay.replay import Replay
from scheduler.replay.trace import TraceRecord
from scheduler.step_feed import WAIT_REASONS, waiting_by_reason


@dataclass(frozen=True, slots=True)
class Slow:
    """One request: seconds until its first token or its end, and what most of them went to."""

    request_id: str
    first_token_s: float
    cause: WaitReason | Stage
    cause_s: float
    status: RequestStatus


@dataclass(frozen=True, slots=True)
class Waits:
    """What a recorded run shows of waiting; requests are the slowest first.

    mean_waiting: requests without a row, by reason, on average over the steps.
    """

    num_steps: int
    run_s: float
    requests: tuple[Slow, ...]
    num_preemptions: int
    tokens_by_use: dict[str, int]
    mean_waiting: dict[WaitReason, float]

    @property
    def num_missed(self) -> int:
        """Requests that ended because their deadlines had passed."""
        return sum(request.status is RequestStatus.DEADLINE for request in self.requests)

    def first_token_s(self, percentile: float) -> float:
        """A percentile of the time to the first token."""
        return float(np.percentile([r.first_token_s for r in self.requests], percentile))


class _Watched(Replay):
    """A replay that counts its steps as a scheduler does."""

    def __init__(self, trace: TraceRecord) -> None:
        super().__init__(trace)
        self.meter = WorkerMeter()
        self.waiting: Counter[WaitReason] = Counter()
        self.times: list[float] = []

    def on_plan(self, plan: StepPlan, now: float) -> None:
        self.times.append(now)
        self.meter.planned(plan)
        core = self.core
        self.meter.sent(plan, core, core.num_waiting, (), now)
        counts = waiting_by_reason(plan.facts, core.num_waiting, core.num_paused)
        self.waiting.update(dict(zip(WAIT_REASONS, counts, strict=True)))


def waits_of(trace: TraceRecord) -> Waits:
    """Replays a trace, and tells where its requests waited."""
    replay = _Watched(trace)
    for _ in replay.steps():
        pass
    explained = map(replay.core.explain, replay.names)
    found = [each for each in explained if each is not None]
    times, num_steps = replay.times, len(replay.times)
    requests = sorted(map(_slow, found), key=lambda slow: (-slow.first_token_s, slow.request_id))
    return Waits(
        num_steps=num_steps,
        run_s=times[-1] - times[0] if times else 0.0,
        requests=tuple(requests),
        num_preemptions=replay.meter.num_preemptions,
        tokens_by_use=dict(replay.meter.num_tokens_by_use),
        mean_waiting={why: n / num_steps for why, n in replay.waiting.items() if n},
    )


def history_of(trace: TraceRecord, request_id: str) -> RequestHistory:
    """The core's account of one request at the end of a trace, as a client has it.

    Raises:
        ValueError: the trace has no such request, or too many that ended later.
    """
    replay = Replay(trace)
    for _ in replay.steps():
        pass
    found = replay.core.explain(request_id)
    if found is None:
        raise ValueError(f"there is no account of a request {request_id!r}")
    return RequestHistory(
        request_id=found.request_id,
        events=tuple(
            ExplainEvent(
                first_step=event.first_step,
                last_step=event.last_step,
                kind=event.kind.value,
                detail=event.detail,
                num_tokens=event.num_tokens,
                queue_position=event.queue_position,
                time_unix_s=event.time,
                duration_s=event.duration_s,
            )
            for event in found.events
        ),
        steps_waited_by_cause={why.name: n for why, n in found.steps_waited_by_cause.items()},
        recomputed_tokens=found.num_recomputed_tokens,
        cached_tokens=found.num_cached_tokens,
        num_preemptions=found.num_preemptions,
        breakdown=tuple(
            StageTime(stage=stage, cause=cause, seconds=seconds)
            for stage, cause, seconds in parts(found.spent_s)
        ),
        total_s=sum(found.spent_s.values()),
        begin_time_unix_s=found.began,
    )


def _slow(explained: RequestExplanation) -> Slow:
    """Until the first token: all waits and the prefill."""
    spent = {
        stage: seconds
        for stage, seconds in explained.spent_s.items()
        if isinstance(stage, WaitReason) or stage in {Stage.NEXT_STEP, Stage.PREFILL}
    }
    cause = max(spent, key=lambda stage: spent[stage])
    return Slow(explained.request_id, sum(spent.values()), cause, spent[cause], explained.status)
