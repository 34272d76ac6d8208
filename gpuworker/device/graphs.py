"""CUDA graphs: kernel launches that are captured once and replayed with one call.

A replay reads and writes the addresses of the capture and runs no Python.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Protocol

import torch

# Beyond this many tokens a step's kernels are long enough to hide their launches.
_MAX_GRAPH_TOKENS = 512
_is_recording = ContextVar("is_recording", default=False)


class StepGraph(Protocol):
    """Recorded launches."""

    def replay(self) -> None:
        """Starts all captured launches in their order."""


class GraphRecorder(Protocol):
    """Captures launches; all graphs of a recorder share one memory pool."""

    def record(self, run: Callable[[], None]) -> StepGraph:
        """Calls `run` more than once and captures its launches."""


class CudaGraphRecorder(GraphRecorder):
    """Graphs of the CUDA (or ROCm) device that is current, recorded on a stream of their own."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _stream()

    def record(self, run: Callable[[], None]) -> StepGraph:
        # Once before the capture: compiling kernels and initializing libraries cannot be captured.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), recording():
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream), recording():
            run()
        return graph


@cache
def _stream() -> torch.cuda.Stream:
    """The same for every recorder: each costs a workspace of the matrix library, tens of MiB that
    stay when a recorder and its graphs, as those that memory is measured with, are gone.
    """
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


@contextmanager
def recording() -> Iterator[None]:
    """Marks code that a recorder runs, including the run before the capture."""
    token = _is_recording.set(True)
    try:
        yield
    finally:
        _is_recording.reset(token)


def is_recording() -> bool:
    """Whether this code is being captured: it must not read values back from the device."""
    return _is_recording.get()


def default_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Padded sizes of steps without chunks: close enough that padding costs little.

    Args:
        max_num_tokens: of such a step.
    """
    most = min(max_num_tokens, _MAX_GRAPH_TOKENS)
    return checked_sizes((1, 2, 4, *range(8, most, 8), most), max_num_tokens)


def checked_sizes(sizes: Sequence[int], max_num_tokens: int) -> tuple[int, ...]:
    """Sizes in rising order, each once, without those that no step has.

    Raises:
        ValueError: a size is not positive.
    """
    if sizes and min(sizes) < 1:
        raise ValueError(f"cuda-graph-sizes: must be at least 1, not {min(sizes)}")
    return tuple(sorted({min(size, max_num_tokens) for size in sizes}))
