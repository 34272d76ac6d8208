"""The part of a layer after attention: one gated MLP; for a mixture of experts see `experts`."""

from typing import Protocol

import torch

from gpuworker.kernels.ops import Activation, Ops
from gpuworker.models.linear import Added, Linear


class Mlp(Protocol):
    """Maps each row of hidden states independently of the other rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are [num_tokens, hidden_size]."""

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        """Same as `Linear.add_to`."""


class GatedMlp(Mlp):
    """down(activation(gate(x)) * up(x)).

    Args:
        gate_up: projects to gates, then ups.
        down: projects back to hidden_size.
        activation: the gate's activation.
        ops: the operations for the device.
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
