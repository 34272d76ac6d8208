"""Which tokens may be drawn: min_p, then top_k, then top_p over what they leave.

All three are thresholds on a row's scaled logits, so tokens that tie at the edge stay together, and
a row's threshold never depends on the other rows: only order-free reductions, sorts and running
sums are used, which torch computes row by row.
"""

from dataclasses import dataclass

import torch

# Most nuclei are smaller than this; a row that needs more is sorted whole.
NUM_CANDIDATES = 1024


@dataclass(frozen=True, slots=True)
class Truncation:
    """Settings of some rows, each [num_rows]; 1, 0 and 0 turn top_p, top_k and min_p off."""

    top_p: torch.Tensor  # float64
    top_k: torch.Tensor  # int64
    min_p: torch.Tensor  # float64

    @property
    def is_off(self) -> torch.Tensor:
        return (self.top_p >= 1) & (self.top_k <= 0) & (self.min_p <= 0)


def thresholds(
    scaled: torch.Tensor, sorted_values: torch.Tensor, truncation: Truncation
) -> torch.Tensor:
    """The smallest scaled logit of each row that may be drawn.

    Args:
        scaled: [num_rows, vocab_size] float32 logits over temperature.
        sorted_values: [num_rows, num_candidates] the largest of them, in falling order.
        truncation: of each row.

    Returns:
        [num_rows] float32.
    """
    vocab_size = scaled.shape[1]
    largest = sorted_values[:, :1]
    threshold = (largest[:, 0].double() + truncation.min_p.log()).float()
    top_k = torch.where(truncation.top_k > 0, truncation.top_k, vocab_size).clamp(max=vocab_size)
    threshold = torch.maximum(threshold, _kth_values(scaled, sorted_values, top_k))

    nucleus = (truncation.top_p < 1).nonzero().squeeze(1)
    if len(nucleus):
        cut = _nucleus_values(
            scaled[nucleus], sorted_values[nucleus], threshold[nucleus], truncation.top_p[nucleus]
        )
        threshold[nucleus] = torch.maximum(threshold[nucleus], cut)
    return threshold


def _kth_values(
    scaled: torch.Tensor, sorted_values: torch.Tensor, top_k: torch.Tensor
) -> torch.Tensor:
    """The top_k-th largest value of each row; minus infinity where top_k is the vocabulary."""
    num_candidates = sorted_values.shape[1]
    within = (top_k.clamp(max=num_candidates) - 1)[:, None]
    values = sorted_values.gather(1, within).squeeze(1)
    for row in (top_k > num_candidates).nonzero().squeeze(1).tolist():
        k = int(top_k[row])
        is_all = k == scaled.shape[1]
        values[row] = -torch.inf if is_all else scaled[row].topk(k).values[-1]
    return values


def _nucleus_values(
    scaled: torch.Tensor, sorted_values: torch.Tensor, threshold: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """The value at which the running sum of probabilities reaches top_p, in each row."""
    largest = sorted_values[:, :1].double()
    wanted = top_p * _running_mass(scaled, largest, threshold)[:, -1]
    mass = _running_mass(sorted_values, largest, threshold)
    # How many tokens stay below the wanted mass; the next one reaches it.
    index = (mass < wanted[:, None]).sum(1)
    last = sorted_values.shape[1] - 1
    values = sorted_values.gather(1, index.clamp(max=last)[:, None]).squeeze(1)
    for row in (index > last).nonzero().squeeze(1).tolist():
        one = slice(row, row + 1)
        ordered = scaled[one].sort(descending=True).values
        mass = _running_mass(ordered, largest[one], threshold[one])
        index = (mass < wanted[one, None]).sum(1).clamp(max=ordered.shape[1] - 1)
        values[row] = ordered[0, index[0]]
    return values


def _running_mass(values: torch.Tensor, largest: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Running sum of exp(value - largest) of values not below the floor: [num_rows, num_values]."""
    mass = (values.double() - largest).exp_()
    return mass.masked_fill_(values < floor[:, None], 0.0).cumsum_(1)
