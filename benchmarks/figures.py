"""A run's figures: latencies by percentile, throughput, errors; as a table and as JSON.

TTFT: arrival to first token. TPOT: (E2E - TTFT) / (n - 1), for requests of two tokens or more.
ITL: gap between two tokens at the client; tokens of one message have gaps of 0.
E2E: arrival to last token. Arrival is when the request was due, so a load generator that falls
behind raises the measured latencies.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Timing:
    """One request: its due time and the times of its tokens, all in seconds on one clock.

    token_times has an entry per message: (when, number of tokens). error is "" for success.
    """

    due_s: float
    sent_s: float = math.nan
    token_times: list[tuple[float, int]] = field(default_factory=list)
    end_s: float = math.nan
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.token_times)

    @property
    def ttft_s(self) -> float:
        return self.token_times[0][0] - self.due_s

    @property
    def e2e_s(self) -> float:
        return self.token_times[-1][0] - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Gaps between consecutive tokens; num_tokens - 1 of them."""
        gaps: list[float] = []
        before = math.nan
        for when, count in self.token_times:
            gaps.append(when - before)
            gaps += [0.0] * (count - 1)
            before = when
        return gaps[1:]


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean, percentiles and maximum, in the figure's unit; nan when there is no value."""

    mean: float
    percentiles: dict[int, float]
    max: float


@dataclass(frozen=True, slots=True)
class Figures:
    """A run's figures; latencies in milliseconds, by name."""

    duration_s: float
    num_requests: int
    num_ok: int
    errors: dict[str, int]
    latencies_ms: dict[str, Spread]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_lateness_ms: float

    @property
    def requests_per_s(self) -> float:
        return self.num_ok / self.duration_s

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.duration_s

    @property
    def total_tokens_per_s(self) -> float:
        return (self.num_output_tokens + self.num_prompt_tokens) / self.duration_s


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the closest ranks; values are sorted. nan when empty."""
    if not values:
        return math.nan
    position = (len(values) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def spread_of(values: Sequence[float]) -> Spread:
    """A figure's spread."""
    ordered = sorted(values)
    return Spread(
        math.fsum(ordered) / len(ordered) if ordered else math.nan,
        {percent: percentile(ordered, percent) for percent in PERCENTILES},
        ordered[-1] if ordered else math.nan,
    )


def figures_of(timings: Sequence[Timing], duration_s: float) -> Figures:
    """Summarizes the requests of a run; failed requests count only in `errors`."""
    good = [timing for timing in timings if not timing.error]
    long = [timing for timing in good if timing.num_tokens > 1]
    seconds = {
        "TTFT": [t.ttft_s for t in good],
        "TPOT": [(t.e2e_s - t.ttft_s) / (t.num_tokens - 1) for t in long],
        "ITL": [gap for t in good for gap in t.gaps_s],
        "E2E": [t.e2e_s for t in good],
    }
    lateness = [t.sent_s - t.due_s for t in timings if not math.isnan(t.sent_s)]
    return Figures(
        duration_s=duration_s,
        num_requests=len(timings),
        num_ok=len(good),
        errors=dict(Counter(t.error for t in timings if t.error).most_common()),
        latencies_ms={name: spread_of([1000 * v for v in vs]) for name, vs in seconds.items()},
        num_prompt_tokens=sum(t.num_prompt_tokens for t in good),
        num_cached_tokens=sum(t.num_cached_tokens for t in good),
        num_output_tokens=sum(t.num_tokens for t in good),
        max_lateness_ms=1000 * max(lateness, default=0.0),
    )


def table(title: str, figures: Figures) -> str:
    """Formats the figures for a person."""
    head = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines = [title, f"{'ms':>6}" + "".join(f"{name:>11}" for name in head)]
    for name, spread in figures.latencies_ms.items():
        cells = [spread.mean, *spread.percentiles.values(), spread.max]
        lines.append(f"{name:>6}" + "".join(f"{_shown(cell):>11}" for cell in cells))
    cached = figures.num_cached_tokens / max(figures.num_prompt_tokens, 1)
    lines.append(
        f"{figures.num_ok} of {figures.num_requests} requests ok in {figures.duration_s:.1f} s:"
        f" {figures.requests_per_s:.2f} requests/s,"
        f" {figures.output_tokens_per_s:.1f} output tokens/s,"
        f" {figures.total_tokens_per_s:.1f} tokens/s with prompts ({cached:.0%} cached)"
    )
    lines.append(f"sent at most {figures.max_lateness_ms:.1f} ms late")
    lines += [f"failed: {count} x {reason}" for reason, count in figures.errors.items()]
    return "\n".join(lines)


def as_json(figures: Figures) -> dict[str, object]:
    """The figures as JSON values; a figure without a value is null."""
    return {
        "duration_s": figures.duration_s,
        "num_requests": figures.num_requests,
        "num_ok": figures.num_ok,
        "errors": figures.errors,
        "requests_per_s": figures.requests_per_s,
        "output_tokens_per_s": figures.output_tokens_per_s,
        "total_tokens_per_s": figures.total_tokens_per_s,
        "num_prompt_tokens": figures.num_prompt_tokens,
        "num_cached_tokens": figures.num_cached_tokens,
        "num_output_tokens": figures.num_output_tokens,
        "max_lateness_ms": figures.max_lateness_ms,
        "latencies_ms": {
            name: {
                "mean": _or_null(spread.mean),
                **{f"p{p}": _or_null(value) for p, value in spread.percentiles.items()},
                "max": _or_null(spread.max),
            }
            for name, spread in figures.latencies_ms.items()
        },
    }


def _shown(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


def _or_null(value: float) -> float | None:
    return None if math.isnan(value) else value
