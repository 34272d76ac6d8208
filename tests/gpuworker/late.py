"""A device that is late: what is copied from it arrives only when somebody waits for it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gpuworker.device.transfers import DeviceEvent, Transfers
from gpuworker.engine import DeviceParts
from gpuworker.kernels.ops import Ops
from gpuworker.kernels.twins import TorchOps


class LateTransfers(Transfers):
    """Copies to the host hold nonsense until an event recorded after them is waited for.

    `num_waits` counts the events that had not passed when they were waited for.
    """

    def __init__(self) -> None:
        self.num_waits = 0
        self._copies: list[Callable[[], object]] = []

    def to_device(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.copy())

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        host = torch.full_like(values, -77)
        self._copies.append(lambda: host.copy_(values))
        return host

    def mark(self) -> "LateEvent":
        copies, self._copies = self._copies, []
        return LateEvent(self, copies)


class LateEvent(DeviceEvent):
    def __init__(self, transfers: LateTransfers, copies: list[Callable[[], Any]]) -> None:
        self._transfers = transfers
        self._copies = copies
        self._has_passed = False

    def query(self) -> bool:
        return self._has_passed

    def synchronize(self) -> None:
        if not self._has_passed:
            self._transfers.num_waits += 1
            self._has_passed = True
            with torch.inference_mode():
                for copy in self._copies:
                    copy()


def late_parts(ops: Ops | None = None) -> DeviceParts:
    return DeviceParts(ops or TorchOps(), LateTransfers())
