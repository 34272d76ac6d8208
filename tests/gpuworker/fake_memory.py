"""A GPU's memory as a worker sees it, made up: what takes how much is told beforehand."""

from collections.abc import Callable
from dataclasses import dataclass

from gpuworker.device.graphs import GraphRecorder, StepGraph
from gpuworker.device.memory import MemoryReader, MemoryReading
from gpuworker.device.transfers import DeviceEvent, HostTransfers
from gpuworker.engine import DeviceParts
from gpuworker.kernels.twins import TorchOps


@dataclass
class FakeMemory(MemoryReader):
    """Bytes of a device.

    step: of one launched step, which stay reserved until the next reset. shared_graph: of the first
    graph captured by a recorder; each_graph: of each after it.
    """

    total: int
    others: int
    weights: int
    step: int
    shared_graph: int
    each_graph: int
    has_run: bool = False
    of_graphs: int = 0

    def read(self) -> MemoryReading:
        reserved = self.weights + self.step * self.has_run
        free = self.total - self.others - reserved - self.of_graphs
        return MemoryReading(self.total, free, reserved, self.weights, peak=reserved)

    def reset(self) -> None:
        self.has_run = False


class SeenTransfers(HostTransfers):
    """Every launch ends in a mark."""

    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory

    def mark(self) -> DeviceEvent:
        self._memory.has_run = True
        return super().mark()


class FakeRecorder(GraphRecorder):
    def __init__(self, memory: FakeMemory) -> None:
        self._memory = memory
        self.num_recorded = 0

    def record(self, run: Callable[[], None]) -> StepGraph:
        is_first = self.num_recorded == 0
        self._memory.of_graphs += self._memory.shared_graph if is_first else self._memory.each_graph
        self.num_recorded += 1
        return NoGraph()


class NoGraph(StepGraph):
    def replay(self) -> None:
        raise AssertionError("nothing was recorded")


class FakeGpu:
    """A CPU that says it has graphs and memory of its own; `recorders` are those it made."""

    def __init__(self, memory: FakeMemory) -> None:
        self.recorders: list[FakeRecorder] = []
        self.memory = memory
        self.parts = DeviceParts(TorchOps(), SeenTransfers(memory), self._make_recorder, memory)

    def _make_recorder(self) -> FakeRecorder:
        self.recorders.append(FakeRecorder(self.memory))
        return self.recorders[-1]
