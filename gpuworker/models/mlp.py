"""The part of a layer after attention: one gated MLP; see `experts` for many."""

<<<<<<< HEAD
from collections.abc import Sequence
from typing import Protocol
=======
from typing import Literal, Protocol
>>>>>>> main

import torch

<<<<<<< HEAD
from gpuworker.kernels.ops import Activation, Ops
from gpuworker.models.linear import Added, Linear, padded_rows
=======
from gpuworker.models.linear import Linear

Activation = Literal["silu", "gelu_tanh"]
>>>>>>> main


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
<<<<<<< HEAD
        return self._ops.gate(self._gate_up(x), self._activation)


class MixtureMlp(Mlp):
    """Each token goes through its top experts, weighed by their probabilities.

    A token's experts are added in the order of their numbers, whatever the other tokens choose.

    Args:
        router: hidden states to one score per expert.
        experts: all of them.
        num_per_token: how many a token goes through.
        is_normalized: whether a token's weights are made to add up to 1.
    """

    def __init__(
        self, router: Linear, experts: Sequence[Mlp], *, num_per_token: int, is_normalized: bool
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_per_token = num_per_token
        self._is_normalized = is_normalized

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self._route(x)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():  # type: ignore[no-untyped-call]
            rows, places = (chosen == number).nonzero(as_tuple=True)
            # The expert's product, too, must not depend on how many tokens come.
            missing = padded_rows(len(rows)) - len(rows)
            padded = torch.cat((rows, rows[:1].expand(missing)))
            result = self._experts[number](x.index_select(0, padded))[: len(rows)]
            out.index_add_(0, rows, result * weights[rows, places].unsqueeze(1))
        return out

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        return residual, self(x)

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights in x's type and experts of each token, [num_tokens, num_per_token]."""
        probabilities = torch.softmax(self._router(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self._num_per_token, dim=-1)
        if self._is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(x.dtype), chosen
=======
        return gated(self._gate_up(x), self._activation)


def gated(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """activation(gate) * up of [num_rows, 2 * size], gates first: [num_rows, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)
>>>>>>> main
