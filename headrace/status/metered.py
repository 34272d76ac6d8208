"""Measures the processor time of one coroutine among the others of its event loop."""

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
