"""Small asynchronous copies between host and device."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class DeviceEvent(Protocol):
    """A point in a device's queue of work."""

    def query(self) -> bool:
        """Whether the device has reached this point."""

    def synchronize(self) -> None:
        """Waits until the device has reached this point; may be called from any thread."""


class Transfers(Protocol):
    """Asynchronous copies, executed in the order in which they were started."""

    def to_device(self, values: NDArray[Any]) -> torch.Tensor:
        """A copy on the device; `values` must not change until the copy is complete."""

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, valid after an event that is recorded later has passed.

        `values` must not be written to afterwards.
        """

    def mark(self) -> DeviceEvent:
        """Records an event after all work that was started so far."""


class HostTransfers(Transfers):
    """Transfers where the device is the CPU: nothing is copied, and every event has passed."""

    def to_device(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values)

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        return values

    def mark(self) -> DeviceEvent:
        return _Passed()


class CudaTransfers(Transfers):
    """Copies through pinned memory, on the current stream.

    Torch does not reuse freed pinned memory before the copies from and to that memory are complete.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_device(self, values: NDArray[Any]) -> torch.Tensor:
        pinned = torch.from_numpy(np.ascontiguousarray(values)).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        return pinned.copy_(values, non_blocking=True)

    def mark(self) -> DeviceEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


class _Passed(DeviceEvent):
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return
