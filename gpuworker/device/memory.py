"""How much of a device's memory is used, and by whom."""

import gc
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes at one moment.

    free: nobody has it. reserved: this process has it for tensors. allocated: tensors have it;
    peak: the most that they had since the peak was reset.
    """

    total: int
    free: int
    reserved: int
    allocated: int
    peak: int

    @property
    def others(self) -> int:
        """What is neither free nor for tensors: other processes, the driver, code."""
        return max(self.total - self.free - self.reserved, 0)


class MemoryReader(Protocol):
    """Reads a device's memory; the device is waited for."""

    def read(self) -> MemoryReading:
        """As it is now."""

    def reset(self) -> None:
        """Gives back what no tensor has, and starts the peak anew."""


class CudaMemory(MemoryReader):
    """Memory of a CUDA or ROCm device, as torch and the driver tell."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> MemoryReading:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        stats = torch.cuda.memory_stats(self._device)
        return MemoryReading(
            total=total,
            free=free,
            reserved=stats["reserved_bytes.all.current"],
            allocated=stats["allocated_bytes.all.current"],
            peak=stats["allocated_bytes.all.peak"],
        )

    def reset(self) -> None:
        torch.cuda.synchronize(self._device)
        # Tensors in reference cycles would count as used.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
