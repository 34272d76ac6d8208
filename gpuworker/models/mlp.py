"""The part of a layer after attention: one gated MLP; see `experts` for many."""

from typing import Protocol

import torch

from gpuworker.kernels.ops import Activation, Ops
from gpuworker.models.linear import Added, Linear


class Mlp(Protocol):
    """A map of hidden states, each row by itself."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x is [num_tokens, hidden_size]; so is the result."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        """As Linear.add_to."""


class GatedMlp(Mlp):
    """down(activation(gate(x)) * up(x)).

    Args:
        gate_up: gate rows, then up rows.
        down: back to hidden_size.
        activation: of the gate.
        ops: of the device.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation, ops: Ops) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(self._gated(x))

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        return self._down.add_to(residual, self._gated(x))

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.gate(self._gate_up(x), self._activation)
