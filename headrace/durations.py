"""Percentiles of what happened lately, from counts since the start that are read repeatedly."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate

from headrace.types import DurationCounts


class RecentDurations:
    """What was counted within a window, over several routers and all models.

    Each reading of a router counts as what is new since the router's reading before. Counts that
    have become smaller are those of a router that was started again.
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._last: dict[tuple[str, str, str], DurationCounts] = {}
        # When a router was read, and what was new then.
        self._new: deque[tuple[float, DurationCounts]] = deque()

    def add(self, router: str, durations: Iterable[DurationCounts], now_s: float) -> None:
        """Take a reading of a router; the first one only begins."""
        for read in durations:
            key = (router, read.metric, read.model)
            before = self._last.get(key)
            self._last[key] = read
            if before is not None:
                self._new.append((now_s, _since(before, read)))
        while self._new and self._new[0][0] <= now_s - self._window_s:
            self._new.popleft()

    def clear(self) -> None:
        """Forget what was counted so far."""
        self._new.clear()

    def percentile_s(self, metric: str, share: float) -> float | None:
        """The duration that this share of the window's durations does not exceed; None: none."""
        found = [new for _, new in self._new if new.metric == metric]
        if not found:
            return None
        bounds_s = found[-1].bounds_s
        # Routers of another version may count in other buckets.
        same = [new.counts for new in found if new.bounds_s == bounds_s]
        return percentile_s(bounds_s, [sum(counts) for counts in zip(*same, strict=True)], share)


def percentile_s(bounds_s: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The duration that this share does not exceed, as if each bucket's were spread evenly.

    The greatest bound stands for all that is longer.

    Args:
        bounds_s: [num_buckets - 1] upper bounds, ascending.
        counts: [num_buckets] durations in each bucket alone.
        share: in (0, 1].
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    totals = list(accumulate(counts))
    at = next(i for i, total in enumerate(totals) if total >= wanted)
    if at == len(bounds_s):
        return bounds_s[-1]
    low_s = bounds_s[at - 1] if at else 0.0
    before = totals[at] - counts[at]
    return low_s + (bounds_s[at] - low_s) * (wanted - before) / counts[at]


def _since(before: DurationCounts, now: DurationCounts) -> DurationCounts:
    if before.bounds_s != now.bounds_s:
        return now
    counts = tuple(new - old for old, new in zip(before.counts, now.counts, strict=True))
    if min(counts) < 0:
        return now
    return DurationCounts(metric=now.metric, model=now.model, bounds_s=now.bounds_s, counts=counts)
