"""The gpuworker's metrics: what each is, how steps are counted, and how all are read at once."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from headrace.service.metrics import (
    STEP_BOUNDS_S,
    Metric,
    Reading,
    Recorder,
    counter,
    gauge,
    histogram,
)

if TYPE_CHECKING:
    from gpuworker.engine import LoadedModel

T = TypeVar("T")

STEP_DURATION = histogram(
    "headrace.gpuworker.step.duration",
    "s",
    "From the start of a step on the model's thread until its tokens are there.",
    bounds=STEP_BOUNDS_S,
)
STEP_GAP = histogram(
    "headrace.gpuworker.step.gap",
    "s",
    "From the end of a step to the start of the next, while requests hold rows.",
    bounds=STEP_BOUNDS_S,
)
FAILED_STEPS = counter("headrace.gpuworker.steps.failed", "{step}", "Steps that ended in an error.")
ROWS = gauge("headrace.gpuworker.rows", "{request}", "Requests that hold a row of this worker.")
KV_TOKENS = gauge(
    "headrace.gpuworker.kv.capacity", "{token}", "Tokens whose keys and values the pool holds."
)

METRICS: tuple[Metric, ...] = (STEP_DURATION, STEP_GAP, FAILED_STEPS, ROWS, KV_TOKENS)


class StepMeter:
    """Counts steps. The model's thread writes; any thread may read."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.num_failed = 0
        self._clock = clock
        self._duration = Recorder(STEP_DURATION)
        self._gap = Recorder(STEP_GAP)
        self._num_open = 0
        self._last_end_s: float | None = None

    def reset(self) -> None:
        """Steps in flight are dropped, and all rows are free."""
        self._num_open = 0
        self._last_end_s = None

    def launch(self, launch: Callable[[], T], num_rows: int) -> tuple[T, float]:
        """Start a step; returns what `launch` gives, and when the step began.

        num_rows: requests that hold rows before the step.
        """
        begun_s = self._clock()
        if not self._num_open and self._last_end_s is not None and num_rows:
            self._gap.record(begun_s - self._last_end_s)
        launched = launch()
        self._num_open += 1
        return launched, begun_s

    def finish(self, finish: Callable[[], T], begun_s: float) -> T:
        """Finish a started step; returns what `finish` gives."""
        try:
            return finish()
        finally:
            self._num_open -= 1
            self._last_end_s = self._clock()
            self._duration.record(self._last_end_s - begun_s)

    def histograms(self) -> Iterator[Reading]:
        """The readings of all histograms."""
        yield self._duration.read()
        yield self._gap.read()


def read(meter: StepMeter, model: "LoadedModel | None") -> Iterator[Reading]:
    """Every metric now; model is None while the model is being loaded."""
    yield from meter.histograms()
    yield FAILED_STEPS, {(): meter.num_failed}
    if model is not None:
        limits = model.runner.limits
        yield ROWS, {(): model.runner.num_requests}
        yield KV_TOKENS, {(): (limits.num_kv_blocks - 1) * limits.block_size}
