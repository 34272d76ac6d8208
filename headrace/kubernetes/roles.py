"""Which worker of a pool should change its role: a pure function, as in `sizing`.

Prefill workers make the first token, so the queue and TTFT measure them; decode workers make the
others, so TPOT measures them. A worker changes sides when one side has been short for a while and
the other would still be on target with one worker less. Where both are short, the pool must grow.
"""

from dataclasses import dataclass

from headrace.kubernetes.sizing import (
    SIGNALS,
    TOLERANCE,
    Measured,
    Targets,
    Trend,
    loads,
    since,
    worst,
)
from headrace.vocabulary import WorkerRole


@dataclass(frozen=True, slots=True)
class Move:
    """A worker's new role, and why."""

    worker_id: str
    role: WorkerRole
    reason: str


def divide(
    measured: Measured, targets: Targets, trend: Trend, now_s: float
) -> tuple[Move | None, Trend]:
    """The worker that should change its role now, and what to remember until the next decision.

    trend says since when prefill (above) or decode (below) has been short. Each side keeps a
    worker. Where either side has no target, or nothing was measured, no worker moves.
    """
    move = _wanted(measured, targets)
    role = move.role if move is not None else None
    trend = Trend(
        since(trend.above_since_s, now_s, is_so=role is WorkerRole.PREFILL),
        since(trend.below_since_s, now_s, is_so=role is WorkerRole.DECODE),
        trend.changed_s,
    )
    short_s = trend.above_since_s if role is WorkerRole.PREFILL else trend.below_since_s
    if move is None or short_s is None or now_s - short_s < targets.up_after_s:
        return None, trend
    if now_s - trend.changed_s < targets.dwell_s:
        return None, trend
    return move, Trend(changed_s=now_s)


def _wanted(measured: Measured, targets: Targets) -> Move | None:
    """The move that the loads of this moment ask for."""
    found = loads(measured, targets)
    prefill = worst(found, SIGNALS[WorkerRole.PREFILL])
    decode = worst(found, SIGNALS[WorkerRole.DECODE])
    if prefill is None or decode is None:
        return None
    for role, (name, load), givers, (giving_name, giving_load) in (
        (WorkerRole.PREFILL, prefill, measured.decode, decode),
        (WorkerRole.DECODE, decode, measured.prefill, prefill),
    ):
        num_left = len(givers) - 1
        if load > 1 + TOLERANCE and num_left > 0:
            would_be = giving_load * len(givers) / num_left
            if would_be < 1 - TOLERANCE:
                reason = (
                    f"{name} is at {load:.0%} of its target, and {giving_name} would be at"
                    f" {would_be:.0%} with one worker less"
                )
                return Move(givers[0], role, reason)
    return None
