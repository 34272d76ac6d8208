"""How much of a device's memory is free, used by tensors, or used by others."""

import gc
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes at one moment.

    free: not used by any process. reserved: held by torch in this process. allocated: used by
    tensors. peak: the largest `allocated` since the last reset.
    """

    total: int
    free: int
    reserved: int
    allocated: int
    peak: int

    @property
    def others(self) -> int:
        """Bytes that are neither free nor reserved: other processes, the driver, code."""
        return max(self.total - self.free - self.reserved, 0)


class MemoryReader(Protocol):
    """Reads a device's memory, after waiting for its work."""

    def read(self) -> MemoryReading:
        """The current values."""

    def reset(self) -> None:
        """Releases cached memory and resets the peak."""


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
