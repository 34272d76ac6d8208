"""The GPU under test: its measured copy and matrix peaks, and a timer that excludes the host.

A dry run replaces the GPU: the kernels run under Triton's interpreter on a CPU, in tiny sizes, and
every call is made once. The times of a dry run mean nothing; it shows that the benchmarks work.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from gpuworker.attention.triton.configs import Target
from gpuworker.attention.triton.device import detect, float8_type
from gpuworker.device.graphs import CudaGraphRecorder

GIGA, TERA = 1e9, 1e12


class Timer(Protocol):
    """Times calls that launch work on the device."""

    num_calls: int  # calls made back to back

    def seconds(self, call: Callable[[], object]) -> float:
        """Seconds of one call."""


class GraphTimer(Timer):
    """Times device work without the host: several calls captured in one CUDA graph.

    Args:
        repeats: number of replays; the median counts.
    """

    num_calls = 10

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats

    def seconds(self, call: Callable[[], object]) -> float:
        def calls() -> None:
            for _ in range(self.num_calls):
                call()

        graph = CudaGraphRecorder().record(calls)
        graph.replay()
        times = []
        for _ in range(self._repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / self.num_calls)
        return statistics.median(times)


class OneCall(Timer):
    """The dry run's timer: makes the call once and reads the wall clock."""

    num_calls = 1

    def seconds(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Machine:
    """The device under test; dtype is the models', float8 is None where unsupported."""

    name: str
    device: torch.device
    target: Target
    timer: Timer
    dtype: torch.dtype
    float8: torch.dtype | None
    is_dry: bool

    def free_bytes(self) -> int:
        """Free memory of the device."""
        if self.is_dry:
            return 1 << 40
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured peaks: bytes moved per second (read plus written), operations per second."""

    copy: float
    matrix: float

    def __str__(self) -> str:
        return f"copy {self.copy / GIGA:.0f} GB/s, matrix {self.matrix / TERA:.0f} TFLOP/s"


def gpu(repeats: int) -> Machine:
    """This machine's GPU."""
    device = torch.device("cuda", torch.cuda.current_device())
    target = detect(device)
    return Machine(
        torch.cuda.get_device_name(device),
        device,
        target,
        GraphTimer(repeats),
        torch.bfloat16,
        float8_type(target),
        is_dry=False,
    )


def dry() -> Machine:
    """A CPU as stand-in; models are float32, as the interpreter computes bfloat16 wrongly."""
    return Machine(
        "dry run",
        torch.device("cpu"),
        Target("sm90", 4),
        OneCall(),
        torch.float32,
        torch.float8_e4m3fn,
        is_dry=True,
    )


def measure_peaks(machine: Machine) -> Peaks:
    """Copy bandwidth of a large copy, and the rate of a large product in the models' type."""
    return Peaks(_copy_peak(machine), _matrix_peak(machine))


def _copy_peak(machine: Machine) -> float:
    # Larger than any cache, small enough for any GPU that serves models.
    num_bytes = 1 << 10 if machine.is_dry else 2 << 30
    source = torch.empty(num_bytes, dtype=torch.uint8, device=machine.device)
    target = torch.empty_like(source)
    return 2 * num_bytes / machine.timer.seconds(lambda: target.copy_(source))


def _matrix_peak(machine: Machine) -> float:
    size = 32 if machine.is_dry else 8192
    left, right = (
        torch.randn(size, size, dtype=machine.dtype, device=machine.device) for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * size**3 / machine.timer.seconds(lambda: torch.matmul(left, right, out=out))
