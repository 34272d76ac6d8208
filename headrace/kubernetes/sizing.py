"""How many workers a pool should have: a pure function of what was measured, and of the time.

Each signal is compared with its target, and the worst of them counts, as in Kubernetes' own
autoscaler: twice the target asks for twice the workers. What is asked for must last before it is
done, and after a change nothing is changed for a while, so that the number does not swing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.vocabulary import WorkerRole

# Less than a tenth above or below the target is on target.
TOLERANCE = 0.1

# What measures the work of a role: prefill makes the first token, decode the others.
_PREFILL, _DECODE = ("queue", "queue wait", "TTFT"), ("TPOT",)
SIGNALS = {
    WorkerRole.PREFILL: _PREFILL,
    WorkerRole.DECODE: _DECODE,
    WorkerRole.MIXED: (*_PREFILL, *_DECODE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What a pool is to achieve; 0 leaves a signal out. Times in seconds.

    by_role: a pool whose workers all prefill, or all decode, is sized by what measures that.
    """

    min_replicas: int = 1
    max_replicas: int = 1
    kv_use: float = 0.8
    queued_per_worker: float = 2.0
    queue_wait_s: float = 0.0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    up_after_s: float = 15.0
    down_after_s: float = 300.0
    dwell_s: float = 60.0
    by_role: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What is measured of a pool now; None where it is not known.

    kv_use: of the ready workers' KV blocks, the fraction in use. Latencies: a high percentile.
    prefill, decode: the ready workers of these roles, the least loaded first; others are mixed.
    """

    num_ready: int
    kv_use: float
    num_queued: int = 0
    queue_wait_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()

    @property
    def role(self) -> WorkerRole:
        """The role that all ready workers have, else MIXED."""
        if len(self.prefill) == self.num_ready:
            return WorkerRole.PREFILL
        return WorkerRole.DECODE if len(self.decode) == self.num_ready else WorkerRole.MIXED


@dataclass(frozen=True, slots=True)
class Trend:
    """What is remembered between two decisions; times on the caller's clock."""

    above_since_s: float | None = None
    below_since_s: float | None = None
    changed_s: float = float("-inf")


@dataclass(frozen=True, slots=True)
class Decision:
    """The number of workers, and why."""

    replicas: int
    reason: str


def decide(
    replicas: int, measured: Measured, targets: Targets, trend: Trend, now_s: float
) -> tuple[Decision, Trend]:
    """The number of workers to ask for, and what to remember until the next decision."""
    if (bounded := _bounded(replicas, targets)) != replicas:
        return Decision(bounded, "outside of the bounds"), Trend(changed_s=now_s)
    name, load = _load(measured, targets)
    # A pool of n workers at load x would be at x * n / (n - 1) with one less.
    num_missing = max(0, replicas - measured.num_ready)
    is_above = load > 1 + TOLERANCE
    is_below = replicas > 1 and load * replicas / (replicas - 1) < 1 - TOLERANCE
    is_below |= replicas == 1 and load == 0 and targets.min_replicas == 0
    trend = replace(
        trend,
        # Of an overload of fewer workers nothing follows for all of them.
        above_since_s=since(trend.above_since_s, now_s, is_so=is_above and not num_missing),
        below_since_s=since(trend.below_since_s, now_s, is_so=is_below),
    )
    says = f"{name} is at {load:.0%} of its target"
    if now_s - trend.changed_s < targets.dwell_s:
        return Decision(replicas, f"{says}; the last change is too recent"), trend
    if is_above and num_missing:
        return Decision(replicas, f"{says}; {num_missing} workers are not ready"), trend
    if trend.above_since_s is not None and now_s - trend.above_since_s >= targets.up_after_s:
        # At most twice as many at once.
        wanted = _bounded(min(math.ceil(replicas * load), 2 * replicas) or 1, targets)
        return _changed(replicas, wanted, says, trend, now_s)
    if trend.below_since_s is not None and now_s - trend.below_since_s >= targets.down_after_s:
        return _changed(replicas, _bounded(replicas - 1, targets), says, trend, now_s)
    return Decision(replicas, says), trend


def _changed(
    replicas: int, wanted: int, says: str, trend: Trend, now_s: float
) -> tuple[Decision, Trend]:
    if wanted == replicas:
        return Decision(replicas, f"{says}; that is the bound"), trend
    return Decision(wanted, says), Trend(changed_s=now_s)


def _bounded(replicas: int, targets: Targets) -> int:
    return min(max(replicas, targets.min_replicas), targets.max_replicas)


def since(since_s: float | None, now_s: float, *, is_so: bool) -> float | None:
    """Since when something is so without a break; None while it is not."""
    if not is_so:
        return None
    return now_s if since_s is None else since_s


def loads(measured: Measured, targets: Targets) -> dict[str, float]:
    """Each signal's share of its target, where there is a target and something was measured."""
    signals = {
        "KV use": (measured.kv_use, targets.kv_use),
        "queue": (measured.num_queued / max(1, measured.num_ready), targets.queued_per_worker),
        "queue wait": (measured.queue_wait_s, targets.queue_wait_s),
        "TTFT": (measured.ttft_s, targets.ttft_s),
        "TPOT": (measured.tpot_s, targets.tpot_s),
    }
    return {
        name: value / target
        for name, (value, target) in signals.items()
        if target and value is not None
    }


def worst(found: Mapping[str, float], names: tuple[str, ...]) -> tuple[str, float] | None:
    """Of these signals the one that is highest above its target, and its load; None: no signal."""
    known = [name for name in names if name in found]
    name = max(known, key=lambda name: found[name], default="")
    return (name, found[name]) if name else None


def _load(measured: Measured, targets: Targets) -> tuple[str, float]:
    """What the pool is sized by.

    With requests waiting and no worker ready, one more worker is needed, whatever the signals say.
    """
    if not measured.num_ready:
        return "queue", 2.0 if measured.num_queued else 0.0
    role = measured.role if targets.by_role else WorkerRole.MIXED
    return worst(loads(measured, targets), ("KV use", *SIGNALS[role])) or ("nothing", 1.0)
