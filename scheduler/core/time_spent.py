"""Where a request's time in a core went: seconds by stage, without a gap and without an overlap.

A request waits, computes its prompt, and decodes. A preemption, a pause and a loss each begin a
stage of their own, which lasts until the request's next token: the new wait and the tokens that are
computed again belong to what caused them.
"""

from collections.abc import Mapping
from enum import Enum

from scheduler.core.plan import WaitReason


class Stage(Enum):
    """What a request does, beside the waits before its first admission."""

    NEXT_STEP = "NEXT_STEP"  # from its arrival until the next step is planned
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    PREEMPTED = "PREEMPTED"
    PAUSED = "PAUSED"
    RECOVERED = "RECOVERED"


# A wait before the first admission is a stage under its reason.
SpentBy = Mapping[Stage | WaitReason, float]


class StageClock:
    """Seconds by stage since a time; the clock is the caller's."""

    __slots__ = ("_since", "_spent_s", "began", "stage")

    def __init__(self, stage: Stage | WaitReason, now: float) -> None:
        self.began = self._since = now
        self.stage = stage
        self._spent_s: dict[Stage | WaitReason, float] = {}

    @property
    def is_waiting(self) -> bool:
        """Whether the request was not admitted yet, nor lost before."""
        return self.stage is Stage.NEXT_STEP or isinstance(self.stage, WaitReason)

    def enter(self, stage: Stage | WaitReason, now: float) -> None:
        """Begin another stage."""
        self._spend(now)
        self.stage = stage

    def spent(self, now: float) -> SpentBy:
        """Seconds by stage up to now, or up to the last stage where that began later."""
        spent = dict(self._spent_s)
        spent[self.stage] = spent.get(self.stage, 0.0) + max(0.0, now - self._since)
        return spent

    def _spend(self, now: float) -> None:
        self._spent_s[self.stage] = self._spent_s.get(self.stage, 0.0) + max(0.0, now - self._since)
        self._since = now


def parts(spent_s: SpentBy) -> list[tuple[str, str, float]]:
    """Name, cause and seconds of all that took any time: first the waits, by their causes."""
    waits = [cause for cause in (*WaitReason, Stage.NEXT_STEP) if spent_s.get(cause)]
    stages = [stage for stage in Stage if stage is not Stage.NEXT_STEP and spent_s.get(stage)]
    return [
        *(("WAIT", cause.name, spent_s[cause]) for cause in waits),
        *((stage.value, "", spent_s[stage]) for stage in stages),
    ]


def total(one: SpentBy, other: SpentBy) -> SpentBy:
    """The sums by stage."""
    return {stage: one.get(stage, 0.0) + other.get(stage, 0.0) for stage in {**one, **other}}
