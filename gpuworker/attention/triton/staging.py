"""How a step's integers reach the device: one copy, from pinned memory that is not yet reused."""

import numpy as np
import torch

from gpuworker.core.plan import Int32Array

# Two steps may be on their way while a third is made.
_NUM_BUFFERS = 3


class StagingRing:
    """One device buffer at a fixed address, fed from a few pinned ones in turn.

    The device buffer is overwritten in stream order: the previous step's kernels have read it by
    then. A pinned buffer is only reused when its copy is done.

    Args:
        capacity: integers that the largest step has.
        device: where the device buffer lives.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._host_buffers = [
            torch.empty(capacity, dtype=torch.int32, pin_memory=True)
            for _ in range(_NUM_BUFFERS if self._is_cuda else 0)
        ]
        self._copied: list[torch.cuda.Event] = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in self._host_buffers
        ]
        self._next = 0

    def send(self, values: Int32Array) -> torch.Tensor:
        """Starts copying values to the device.

        Args:
            values: [num_values] at most capacity.

        Returns:
            [capacity] the device buffer, whose first num_values will be these until the next call.
        """
        num_values = len(values)
        assert num_values <= len(self._device_buffer), "step is larger than its limits"
        if not self._is_cuda:
            self._device_buffer[:num_values] = torch.from_numpy(values)
            return self._device_buffer
        turn = self._next
        self._next = (turn + 1) % len(self._host_buffers)
        self._copied[turn].synchronize()
        host = self._host_buffers[turn]
        host.numpy()[:num_values] = np.asarray(values)
        self._device_buffer[:num_values].copy_(host[:num_values], non_blocking=True)
        self._copied[turn].record()
        return self._device_buffer
