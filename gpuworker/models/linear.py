"""Matrix products with weights.

On a CPU, weights are repacked once for oneDNN's kernels, which are faster than the default BLAS at
every number of rows. In float32, with at least two rows, the bits of a row's result do not depend
on the other rows, so a request's tokens do not depend on the rest of the batch. In bfloat16 this
holds only on some machines: with AMX, oneDNN splits the inner dimension by the number of rows.
"""

from typing import Protocol

import torch
from torch.nn import functional

# With one row oneDNN splits the inner dimension differently, which changes the row's bits.
MIN_ROWS = 2

# The operators that torch.compile calls for frozen weights; they have no public names. The code
# names the overload: torch's overload resolution would double a small product's overhead of 13 us.
_onednn = torch.ops.mkldnn

Added = tuple[torch.Tensor, torch.Tensor | None]
"""A residual stream, and a term that is still to be added to the residual, or None."""


class Linear(Protocol):
    """y = x w^T + b."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x is [num_tokens, in_features]; returns [num_tokens, out_features]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        """Returns (residual + self(x), None), or both terms if the product cannot add.

        In the second case the next norm adds the terms. The arguments are not changed.
        """


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The fastest product for the weight's device; weight is [out_features, in_features]."""
    if is_repacked(weight.device, weight.dtype):
        return _PackedLinear(weight, bias)
    return _PlainLinear(weight, bias)


def is_repacked(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products on this device repack weights, so that rows cannot be read from them."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(_onednn._is_mkldnn_bf16_supported())  # noqa: SLF001
    return dtype == torch.float32


class _PlainLinear(Linear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        return residual, self(x)


class _PackedLinear(Linear):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = _onednn._reorder_linear_weight(weight.contiguous(), 64)  # noqa: SLF001
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _onednn._linear_pointwise.default(  # noqa: SLF001
            x, self._weight, self._bias, "none", [], ""
        )
        return result

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        result: torch.Tensor = _onednn._linear_pointwise.binary(  # noqa: SLF001
            x, residual, self._weight, self._bias, "add"
        )
        return result, None


def padded_rows(num_rows: int) -> int:
    """The number of rows to pad a product to: at least MIN_ROWS, and few different sizes.

    oneDNN generates code for each new size (about 0.7 ms per layer shape), so sizes are rounded
    up: by at most a third, and by at most 63 rows.
    """
    if num_rows <= 8:
        return max(num_rows, MIN_ROWS)
    step = min(1 << max((num_rows - 1).bit_length() - 3, 2), 64)
    return -(-num_rows // step) * step
