"""Bounds the share of an event loop that one of its tasks takes."""

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class _Metered(Generic[T]):
    """Awaits like the coroutine itself, and sums the time that its steps take."""

    def __init__(self, work: Coroutine[Any, Any, T], processor_time: Callable[[], float]) -> None:
        self._work = work
        self._processor_time = processor_time

    def __await__(self) -> Generator[Any, Any, tuple[T, float]]:
        spent_s = 0.0
        raised: BaseException | None = None
        while True:
            begun = self._processor_time()
            try:
                waits_for = self._work.send(None) if raised is None else self._work.throw(raised)
            except StopIteration as stop:
                return stop.value, spent_s + self._processor_time() - begun
            spent_s += self._processor_time() - begun
            raised = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 it belongs to the coroutine
                raised = error


async def metered(
    work: Coroutine[Any, Any, T], processor_time: Callable[[], float]
) -> tuple[T, float]:
    """Awaits `work`; its result and the processor time of its own steps, in seconds.

    What other tasks do while `work` waits is not counted; nor are tasks that `work` starts.
    """
    return await _Metered(work, processor_time)


class Pace:
    """Says how long a task must pause so that its work takes a share of the time, and no more.

    Time that was not used gives credit for a burst, up to max_credit_s.
    """

    def __init__(
        self, *, max_credit_s: float, max_pause_s: float, clock: Callable[[], float]
    ) -> None:
        """No pause exceeds max_pause_s; what is still owed then makes the next pauses longer."""
        self._max_credit_s = max_credit_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._credit_s = max_credit_s
        self._counted_at = clock()

    def pause_s(self, spent_s: float, share: float) -> float:
        """The pause after work that took spent_s; share is the work's part of the time."""
        now = self._clock()
        earned_s = (now - self._counted_at) * share
        self._counted_at = now
        self._credit_s = min(self._credit_s + earned_s, self._max_credit_s) - spent_s
        return min(max(0.0, -self._credit_s / share), self._max_pause_s)
