"""Matrix products with weights.

On a CPU, weights are repacked once for oneDNN's kernels. They are faster than the default BLAS at
every number of rows. In float32, from two rows on, each row's result has the same bits whatever
the other rows are: that is what makes a request's tokens independent of its neighbours. In bfloat16
that holds on some machines only: with AMX, oneDNN cuts the depth by the number of rows.
"""

from typing import Protocol

import torch
from torch.nn import functional

# Below two rows oneDNN cuts the depth differently, and a row's bits would depend on it.
MIN_ROWS = 2

# What torch.compile itself calls for frozen weights; there is no public name for them. Overloads
# are named: to have torch choose one costs as much as a small product's other overhead, 13 us.
_onednn = torch.ops.mkldnn

Added = tuple[torch.Tensor, torch.Tensor | None]
"""A residual stream, and what is still to be added to it if anything is."""


class Linear(Protocol):
    """y = x w^T + b."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x is [num_tokens, in_features]; returns [num_tokens, out_features]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        """Returns residual + self(x) where the product can add; else both, and the next norm adds.

        Neither argument is changed.
        """


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """The best product for where the weight is; weight is [out_features, in_features]."""
    if is_repacked(weight.device, weight.dtype):
        return _PackedLinear(weight, bias)
    return _PlainLinear(weight, bias)


def is_repacked(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products there repack their weights, so that no row can be read from them."""
    return device.type == "cpu" and _can_pack(dtype)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
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
    """Rows to pad a product to: at least MIN_ROWS, and few different sizes.

    oneDNN generates code for each size it meets (about 0.7 ms per layer shape), so sizes are
    rounded: by at most a third, and by at most 63 rows.
    """
    if num_rows <= 8:
        return max(num_rows, MIN_ROWS)
    step = min(1 << max((num_rows - 1).bit_length() - 3, 2), 64)
    return -(-num_rows // step) * step
