"""Launches Triton kernels: compiles a kernel once per class of arguments and keeps the binary.

Triton's own dispatch takes tens of microseconds for a kernel with twenty arguments; a `HeldKernel`
takes a quarter of that. Under Triton's interpreter (TRITON_INTERPRET=1, read when triton is
imported) a kernel is a Python function and is called directly.
"""

import subprocess
from collections.abc import Mapping
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

Grid = tuple[int, int, int]

# Triton's AMD backend uses 32-bit offsets for tensors smaller than this.
_SMALL_BYTES = 1 << 31
_ALIGNMENT = 16


def make_ready() -> None:
    """Makes Triton build its launcher for this machine's GPU.

    Raises:
        ValueError: Triton cannot build the launcher; the message says what is missing.
    """
    try:
        triton.runtime.driver.active.get_current_device()
    except (RuntimeError, AssertionError, OSError, subprocess.CalledProcessError) as error:
        raise ValueError(
            f"the GPU's kernels cannot be started: {error}. Triton builds a small module for that, "
            "and needs a C compiler (gcc, clang or $CC), Python's headers (python3-dev) and a "
            "folder to write to (~/.triton or $TRITON_CACHE_DIR)"
        ) from error


class HeldKernel:
    """A kernel with its constants bound.

    A kernel's parameters are first its arguments, then its constants. Integer arguments must be
    marked `do_not_specialize`: the compiled kernel then depends only on the tensors' types,
    alignment and size class.

    Args:
        function: a function decorated with `triton.jit`.
        constants: the values of its constexpr parameters, in order.
        options: compiler options such as num_warps and num_stages.
    """

    def __init__(
        self, function: Any, constants: Mapping[str, Any], options: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._is_interpreted = isinstance(function, InterpretedFunction)
        self._constants = dict(constants)
        self._constant_values = tuple(constants.values())
        self._options = dict(options)
        self._compiled: dict[tuple[Any, ...], Any] = {}
        names = list(function.arg_names)
        assert names[len(names) - len(constants) :] == list(constants), (
            f"{function.__name__} takes {names}, its last are not {list(constants)}"
        )

    def __call__(self, grid: Grid, *arguments: Any) -> None:
        """Launches the kernel on the current stream; arguments exclude the constants."""
        if self._is_interpreted:
            self._function[grid](*arguments, **self._constants)
            return
        active = triton.runtime.driver.active
        device = active.get_current_device()
        key = (device, *[_class_of(argument) for argument in arguments])
        kernel = self._compiled.get(key)
        if kernel is None:
            self._compiled[key] = self._function[grid](
                *arguments, **self._constants, **self._options
            )
            return
        kernel.run(
            *grid,
            active.get_current_stream(device),
            kernel.function,
            kernel.packed_metadata,
            None,
            None,
            None,
            *arguments,
            *self._constant_values,
        )


def _class_of(argument: Any) -> Any:
    """The properties of an argument that decide which compiled kernel fits."""
    if not isinstance(argument, torch.Tensor):
        return None
    return (
        argument.dtype,
        argument.data_ptr() % _ALIGNMENT == 0,
        argument.untyped_storage().nbytes() < _SMALL_BYTES,
    )
