"""Sends a step's integers to the device with one copy from pinned memory."""

import torch

from gpuworker.core.plan import Int32Array

# Two steps may be in flight while a third is prepared.
_NUM_BUFFERS = 3


class StagingRing:
    """A device buffer at a fixed address, filled in turn from a few pinned host buffers.

    The device buffer is overwritten in stream order, after the previous step's kernels have read
    it. A pinned buffer is reused only after its copy is complete.

    Args:
        capacity: number of integers in the largest step.
        device: the device of the buffer.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device_buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        # On a CPU the buffer is read before the next step is written.
        self._host_buffers = [
            torch.zeros(capacity, dtype=torch.int32, pin_memory=self._is_cuda)
            for _ in range(_NUM_BUFFERS if self._is_cuda else 1)
        ]
        self._host_views: list[Int32Array] = [buffer.numpy() for buffer in self._host_buffers]
        self._copied: list[torch.cuda.Event] = [
            torch.cuda.Event()  # type: ignore[no-untyped-call]
            for _ in range(_NUM_BUFFERS if self._is_cuda else 0)
        ]
        self._turn = 0
        self._num_values = 0

    @property
    def device_buffer(self) -> torch.Tensor:
        """[capacity]; begins with the integers that were sent last."""
        return self._device_buffer

    def reserve(self, num_values: int) -> Int32Array:
        """A host buffer for the next step: [num_values]; fill the buffer, then call `send`."""
        assert num_values <= len(self._device_buffer), "step is larger than its limits"
        self._turn = (self._turn + 1) % len(self._host_buffers)
        if self._is_cuda:
            self._copied[self._turn].synchronize()
        self._num_values = num_values
        return self._host_views[self._turn][:num_values]

    def send(self) -> torch.Tensor:
        """Starts the copy of the reserved host buffer to the device.

        Returns:
            [capacity] the device buffer, which begins with these values until the next call.
        """
        host = self._host_buffers[self._turn][: self._num_values]
        self._device_buffer[: self._num_values].copy_(host, non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record()
        return self._device_buffer
