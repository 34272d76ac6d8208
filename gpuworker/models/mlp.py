"""The part of a layer after attention: one gated MLP; see `experts` for many."""

from typing import Literal, Protocol

import torch
from torch.nn import functional

from gpuworker.models.linear import Linear

Activation = Literal["silu", "gelu_tanh"]


class Mlp(Protocol):
    """A map of hidden states, each row by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x is [num_tokens, hidden_size]; so is the result."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + self(x), in one pass where the device can; neither is changed."""


class GatedMlp(Mlp):
    """down(activation(gate(x)) * up(x)).

    Args:
        gate_up: gate rows, then up rows.
        down: back to hidden_size.
        activation: of the gate.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._gated(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._down.add_to(residual, self._gated(x))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return gated(self._gate_up(x), self._activation)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up of [num_rows, 2 * size], gates first: [num_rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)
