"""Measures at the client how fast an answer came."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from headrace.types import Delta, Usage


@dataclass(frozen=True, slots=True)
class Figures:
    """TTFT is call to first token, TPOT (E2E - TTFT) / (tokens - 1); None where undefined."""

    num_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    tokens_per_s: float
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    def __str__(self) -> str:
        ttft = "-" if self.ttft_s is None else f"{self.ttft_s * 1000:.0f} ms"
        tpot = "-" if self.tpot_s is None else f"{self.tpot_s * 1000:.1f} ms"
        drafts = ""
        if self.num_draft_tokens:
            drafts = f", {self.num_accepted_draft_tokens} of {self.num_draft_tokens} drafts right"
        return (
            f"{self.num_tokens} tokens in {self.e2e_s:.2f} s: TTFT {ttft}, TPOT {tpot},"
            f" {self.tokens_per_s:.1f} tokens/s{drafts}"
        )


class Stopwatch:
    """Measures an answer: starts when constructed, sees each delta, gives figures at the end."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._first: float | None = None
        self._last = self._began
        self._num_tokens = 0
        self._usage: Usage | None = None

    def see(self, delta: Delta) -> None:
        """Counts a delta's tokens, now."""
        self._last = self._clock()
        if delta.token_ids and self._first is None:
            self._first = self._last
        self._num_tokens += len(delta.token_ids)
        self._usage = delta.usage or self._usage

    def figures(self) -> Figures:
        """The measurements up to the last delta."""
        e2e_s = self._last - self._began
        ttft_s = None if self._first is None else self._first - self._began
        tpot_s = None
        if ttft_s is not None and self._num_tokens > 1:
            tpot_s = (e2e_s - ttft_s) / (self._num_tokens - 1)
        rate = self._num_tokens / e2e_s if e2e_s > 0 else 0.0
        figures = Figures(self._num_tokens, ttft_s, tpot_s, e2e_s, rate)
        if (usage := self._usage) is None:
            return figures
        return replace(
            figures,
            num_draft_tokens=usage.draft_tokens,
            num_accepted_draft_tokens=usage.accepted_draft_tokens,
        )
