"""How fast a queue moves: prompt tokens that leave it per second of waiting.

Time counts only while requests wait; otherwise an idle night would look like a slow worker. Old
measurements fade with a half-life, so the rate follows workers that join and leave.
"""

_MIN_BUSY_S = 0.5


class ServiceRate:
    """Two fading sums: tokens dispatched, and seconds in which something waited."""

    def __init__(self, *, half_life_s: float = 10.0) -> None:
        self._half_life_s = half_life_s
        self._num_tokens = 0.0
        self._busy_s = 0.0
        self._seen_at: float | None = None

    def observe(self, now: float, *, num_tokens: int = 0, is_waiting: bool) -> None:
        """Record what left the queue, and whether requests waited since the last call."""
        elapsed_s = 0.0 if self._seen_at is None else max(0.0, now - self._seen_at)
        self._seen_at = now
        if is_waiting and elapsed_s:
            kept = 0.5 ** (elapsed_s / self._half_life_s)
            self._num_tokens *= kept
            self._busy_s = self._busy_s * kept + elapsed_s
        if is_waiting:
            self._num_tokens += num_tokens

    @property
    def tokens_per_s(self) -> float | None:
        """None until requests have waited for long enough, and left, for a measurement."""
        is_known = self._busy_s >= _MIN_BUSY_S and self._num_tokens > 0
        return self._num_tokens / self._busy_s if is_known else None

    def predicted_wait_s(self, num_tokens_ahead: int) -> float:
        """How long the tokens ahead will take; 0 while the rate is not known."""
        rate = self.tokens_per_s
        return num_tokens_ahead / rate if rate else 0.0
