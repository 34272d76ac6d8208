"""How CUDA graphs are recorded, with a CUDA that only notes what it is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gpuworker.device import graphs
from gpuworker.device.graphs import CudaGraphRecorder, is_recording


class NotedCuda:
    """Streams are numbers, the first being the current one; `runs` are where what ran."""

    def __init__(self) -> None:
        self.num_streams = 1
        self.current = 0
        self.captured: object = None
        self.runs: list[tuple[int, object]] = []

    def make_stream(self) -> "NotedStream":
        self.num_streams += 1
        return NotedStream(self.num_streams - 1)

    @contextmanager
    def stream(self, stream: "NotedStream") -> Iterator[None]:
        before, self.current = self.current, stream.number
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: object, pool: object, stream: "NotedStream") -> Iterator[None]:
        self.captured = pool
        with self.stream(stream):
            yield
        self.captured = None

    def run(self) -> None:
        assert is_recording()
        self.runs.append((self.current, self.captured))


class NotedStream:
    def __init__(self, number: int) -> None:
        self.number = number

    def wait_stream(self, other: "NotedStream") -> None:
        assert other.number != self.number


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[NotedCuda]:
    noted = NotedCuda()
    replaced: dict[str, Any] = {
        "Stream": noted.make_stream,
        "stream": noted.stream,
        "current_stream": lambda: NotedStream(noted.current),
        "graph": noted.graph,
        "CUDAGraph": object,
        "graph_pool_handle": lambda: "pool",
    }
    for name, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    graphs._stream.cache_clear()
    yield noted
    graphs._stream.cache_clear()


def test_all_graphs_are_warmed_up_and_captured_on_one_stream(cuda: NotedCuda) -> None:
    first, second = CudaGraphRecorder(), CudaGraphRecorder()
    for recorder in (first, first, second):
        recorder.record(cuda.run)
    assert cuda.runs == 3 * [(1, None), (1, "pool")]
    assert cuda.num_streams == 2
    assert not is_recording()
