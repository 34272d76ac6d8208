"""Mixture of experts: each token runs through a few gated MLPs, weighted by router probability.

Two classes compute the same sum. On a CPU the chosen experts run one after the other. On a GPU
tokens are sorted by expert and all experts run at once. The launches then do not depend on the
router's choice, so that a CUDA graph can capture them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.nn import functional

from gpuworker.device.graphs import is_recording
from gpuworker.models.linear import Added, Linear, padded_rows
from gpuworker.models.mlp import Mlp

# Major compute capabilities for which torch has a grouped bfloat16 product. On other devices torch
# copies the group sizes to the host and loops over the groups.
_GROUPED_CAPABILITIES = {9, 10}


class Experts(Protocol):
    """All experts of a layer."""

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of each token's experts.

        Args:
            x: [num_tokens, hidden_size].
            weights: [num_tokens, num_per_token], in x's type.
            chosen: [num_tokens, num_per_token] int64 distinct experts of each token.

        Returns:
            [num_tokens, hidden_size].
        """


class MixtureMlp(Mlp):
    """Runs each token through its top experts, weighted by router probability.

    Args:
        router: maps hidden states to one score per expert.
        experts: all experts of the layer.
        num_per_token: number of experts per token.
        is_normalized: whether a token's weights are normalized to sum to 1.
    """

    def __init__(
        self, router: Linear, experts: Experts, *, num_per_token: int, is_normalized: bool
    ) -> None:
        self._router = router
        self._experts = experts
        self._num_per_token = num_per_token
        self._is_normalized = is_normalized

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        probabilities = torch.softmax(self._router(x).float(), dim=-1)
        weights, chosen = probabilities.topk(self._num_per_token, dim=-1)
        if self._is_normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return self._experts(x, weights.to(x.dtype), chosen)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> Added:
        return residual, self(x)


class ListedExperts(Experts):
    """Experts as separate MLPs; an expert that no token chose does not run.

    A token's experts are summed by ascending expert index, whatever the other tokens choose.
    """

    def __init__(self, experts: Sequence[Mlp]) -> None:
        self._experts = experts

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        order, ends = _by_expert(chosen, len(self._experts))
        rows = order // chosen.shape[1]
        shares = weights.reshape(-1, 1).index_select(0, order)
        out = torch.zeros_like(x)
        start = 0
        for expert, end in zip(self._experts, ends.tolist(), strict=True):
            if end > start:
                own = rows[start:end]
                # Padded, so that a token's bits do not depend on how many tokens chose the expert.
                missing = padded_rows(end - start) - (end - start)
                padded = torch.cat((own, own[:1].expand(missing)))
                result = expert(x.index_select(0, padded))[: end - start]
                out.index_add_(0, own, result * shares[start:end])
            start = end
        return out


class GroupedExperts(Experts):
    """All experts stacked, with one weight tensor per product.

    Args:
        gate_up: [num_experts, 2 * intermediate_size, hidden_size], gates first.
        down: [num_experts, hidden_size, intermediate_size].
        gate: maps [num_rows, 2 * intermediate_size] to [num_rows, intermediate_size].
        is_grouped_in_graphs: see `has_grouped_product`.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate: Callable[[torch.Tensor], torch.Tensor],
        *,
        is_grouped_in_graphs: bool,
    ) -> None:
        self._gate_up = gate_up.transpose(1, 2)
        self._down = down.transpose(1, 2)
        self._gate = gate
        self._is_grouped_in_graphs = is_grouped_in_graphs

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor
    ) -> torch.Tensor:
        if self._is_grouped_in_graphs or not is_recording():
            results = self.grouped(x, chosen)
        else:
            results = self.dense(x, chosen)
        return (results.float() * weights.float().unsqueeze(-1)).sum(1).to(x.dtype)

    def grouped(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The output of each token's experts: [num_tokens, num_per_token, hidden_size]."""
        num_tokens, num_per_token = chosen.shape
        order, ends = _by_expert(chosen, self._down.shape[0])
        sorted_x = x.index_select(0, order // num_per_token)
        inner = self._gate(functional.grouped_mm(sorted_x, self._gate_up, offs=ends))
        sorted_results = functional.grouped_mm(inner, self._down, offs=ends)
        results = torch.empty_like(sorted_results).index_copy_(0, order, sorted_results)
        return results.view(num_tokens, num_per_token, -1)

    def dense(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The same result as `grouped`, computed by running every token through every expert.

        Used in CUDA graphs of decodes on devices without a grouped product. With some dozen tokens
        nearly all experts are chosen anyway, and reading their weights dominates the time.
        """
        num_experts, inner_size, _ = self._down.shape
        gate_up = torch.matmul(x, self._gate_up)
        inner = self._gate(gate_up.flatten(0, 1)).view(num_experts, -1, inner_size)
        results = torch.bmm(inner, self._down).transpose(0, 1)
        return results.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[1]))


def _by_expert(chosen: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts choices by expert; also returns the end of each expert's range.

    Returns:
        [num_tokens * num_per_token] int64 indices into the flat choices, and [num_experts] int32.
    """
    experts, order = chosen.reshape(-1).sort(stable=True)
    every = torch.arange(num_experts, device=chosen.device)
    return order, torch.searchsorted(experts, every, right=True, out_int32=True)


def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies groups on this device without copying their sizes to the host."""
    if device.type != "cuda" or torch.version.hip or dtype != torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(device)[0] in _GROUPED_CAPABILITIES
