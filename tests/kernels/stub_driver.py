"""A Triton driver for no device: the worker's own launch wrappers run and compile for any target.

It names the target, accepts binaries and checks launches without making them. Targets are devices
0, 1, ...: Triton keeps compiled kernels apart by device.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.tools.tensor_descriptor import TensorDescriptor

GPU_TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Bytes that one program may hold, from the vendors' tables.
SHARED_MEMORY_LIMITS = {"sm80": 166912, "sm90": 232448, "sm100": 232448, "gfx942": 65536}


class StubUtils:
    """What Triton asks of a device's runtime."""

    def __init__(self, archs: Sequence[str]) -> None:
        self._archs = archs

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        return (0, 0, 0, 0, 1024)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY_LIMITS[self._archs[device]]}


class StubLauncher:
    """Checks that a launch's arguments are of the kinds that the kernel was compiled for."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self._name = src.name
        self._kinds = list(src.signature.values())

    def __call__(self, *arguments: Any) -> None:
        values = arguments[9:]
        assert len(values) == len(self._kinds), f"{self._name} takes {self._kinds}"
        for value, kind in zip(values, self._kinds, strict=True):
            assert _fits(value, kind), f"{self._name}: {value!r} is no {kind}"


class StubDriver:
    """Stands in for a device; `use` chooses which."""

    def __init__(self, archs: Sequence[str] = tuple(GPU_TARGETS)) -> None:
        self._archs = archs
        self._current = 0
        self.utils = StubUtils(archs)
        self.launcher_cls = StubLauncher

    def use(self, arch: str) -> None:
        """Makes a target the current device."""
        self._current = self._archs.index(arch)

    def get_current_target(self) -> GPUTarget:
        return GPU_TARGETS[self._archs[self._current]]

    def get_current_device(self) -> int:
        return self._current

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def install() -> StubDriver:
    """Makes a stub the active driver of this process."""
    driver = StubDriver()
    triton.runtime.driver.set_active(driver)
    return driver


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("*"):
        return isinstance(value, torch.Tensor)
    if kind.startswith("tensordesc"):
        return isinstance(value, TensorDescriptor)
    if kind in {"fp32", "fp64"}:
        return isinstance(value, float)
    return kind == "constexpr" or isinstance(value, int)
