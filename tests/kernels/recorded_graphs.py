"""What a CUDA graph does, without CUDA: launches are recorded once and repeated on the same memory.

Every operation of torch and every kernel is kept with the very tensors that it had. Repeating one
writes to the tensors of the recording; no Python of the recorded code runs again. What a capture on
a device forbids, reading a number back or a size that depends on data, is refused here, too.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gpuworker.device.graphs import GraphRecorder, StepGraph, recording
from gpuworker.kernels.launch import HeldKernel

_FORBIDDEN = ("_local_scalar_dense", "nonzero", "_unique2", "masked_select")


class RecordedGraph(StepGraph):
    """Launches in their order."""

    def __init__(self, launches: list[Callable[[], object]]) -> None:
        self._launches = launches
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        for launch in self._launches:
            launch()


class RecordingGraphs(GraphRecorder):
    """Keeps the graphs that it made, in order."""

    def __init__(self) -> None:
        self.graphs: list[RecordedGraph] = []

    def record(self, run: Callable[[], None]) -> StepGraph:
        with recording():
            return self._record(run)

    def _record(self, run: Callable[[], None]) -> StepGraph:
        run()
        launches: list[Callable[[], object]] = []
        launch_kernel = HeldKernel.__call__

        def recorded_kernel(kernel: HeldKernel, *arguments: Any) -> None:
            with _disable_current_modes():
                launch_kernel(kernel, *arguments)
            launches.append(partial(launch_kernel, kernel, *arguments))

        HeldKernel.__call__ = recorded_kernel
        try:
            with _Recording(launches):
                run()
        finally:
            HeldKernel.__call__ = launch_kernel
        self.graphs.append(RecordedGraph(launches))
        return self.graphs[-1]

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


class _Recording(TorchDispatchMode):
    def __init__(self, launches: list[Callable[[], object]]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in _FORBIDDEN, f"{name} cannot be captured"
        outputs = func(*args, **(kwargs or {}))
        if not name.startswith(("empty", "new_empty")):
            self._launches.append(partial(_repeat, func, args, kwargs or {}, outputs))
        return outputs


def _repeat(func: Any, args: Any, kwargs: Any, outputs: Any) -> None:
    """Runs an operation again into the memory that its outputs had."""
    again = func(*args, **kwargs)
    if isinstance(outputs, torch.Tensor):
        outputs, again = (outputs,), (again,)
    for old, new in zip(outputs, again, strict=True):
        if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
            old.copy_(new)
