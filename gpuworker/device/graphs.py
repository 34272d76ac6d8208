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
    """The stream of all recorders.

    For each stream the matrix library allocates a workspace of tens of MiB and never frees it, so
    the recorder that measures memory (`memory_profile`) and the final recorder share one stream.
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
    """Whether this code is being captured; captured code must not read values from the device."""
    return _is_recording.get()


def default_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Padded sizes of steps without chunks, so close to each other that padding costs little.

    Args:
        max_num_tokens: the most tokens of such a step.
    """
    most = min(max_num_tokens, _MAX_GRAPH_TOKENS)
    return checked_sizes((1, 2, 4, *range(8, most, 8), most), max_num_tokens)


def checked_sizes(sizes: Sequence[int], max_num_tokens: int) -> tuple[int, ...]:
    """Distinct sizes in rising order; sizes above max_num_tokens become max_num_tokens.

    Raises:
        ValueError: a size is not positive.
    """
    if sizes and min(sizes) < 1:
        raise ValueError(f"cuda-graph-sizes: must be at least 1, not {min(sizes)}")
    return tuple(sorted({min(size, max_num_tokens) for size in sizes}))
