"""Which tokens may be drawn: min_p, then top_k, then top_p over what they leave.

All three are thresholds on a row's scaled logits, so tokens that tie at the edge stay together, and
a row's threshold never depends on the other rows: only order-free reductions, sorts, and sums in an
order of their own are used.
"""

from dataclasses import dataclass

import torch

# Torch sums this many neighbours in one order, however many rows there are; a single row of a whole
# vocabulary it would share out among threads.
_SUM_WIDTH = 256


@dataclass(frozen=True, slots=True)
class Truncation:
    """Settings of some rows, each [num_rows]; 1, 0 and 0 turn top_p, top_k and min_p off."""

    top_p: torch.Tensor  # float64
    top_k: torch.Tensor  # int64
    min_p: torch.Tensor  # float64

    @property
    def is_off(self) -> torch.Tensor:
        return (self.top_p >= 1) & (self.top_k <= 0) & (self.min_p <= 0)

    def of(self, rows: torch.Tensor) -> "Truncation":
        """The settings of some of the rows."""
        return Truncation(self.top_p[rows], self.top_k[rows], self.min_p[rows])


def thresholds(
    scaled: torch.Tensor, candidates: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest scaled logit of each row that may be drawn, as far as the candidates tell.

    Args:
        scaled: [num_rows, vocab_size] float32 logits over temperature.
        candidates: [num_rows, num_candidates] the largest of them, in falling order.
        truncation: of each row.

    Returns:
        [num_rows] float32 thresholds, and [num_rows] whether every drawable token is a candidate;
        a threshold means nothing where it is not.
    """
    vocab_size, num_candidates = scaled.shape[1], candidates.shape[1]
    largest = candidates[:, :1]
    floor = (largest[:, 0].double() + truncation.min_p.log()).float()
    top_k = torch.where(truncation.top_k > 0, truncation.top_k, vocab_size)
    kth = candidates.gather(1, (top_k.clamp(max=num_candidates) - 1)[:, None]).squeeze(1)
    # A row without top_k keeps everything; one whose top_k is past the candidates fails below.
    floor = torch.where(top_k < vocab_size, torch.maximum(floor, kth), floor)

    mass = (candidates - largest).exp_().masked_fill_(candidates < floor[:, None], 0.0)
    mass = mass.cumsum(1, dtype=torch.float64)
    total = mass[:, -1]
    is_open = floor == -torch.inf
    if is_open.any():
        total = torch.where(is_open, _row_sums((scaled - largest).exp_()), total)
    index = (mass < (truncation.top_p * total)[:, None]).sum(1)
    is_nucleus_inside = (index < num_candidates) | (truncation.top_p >= 1)
    edge = candidates.gather(1, index.clamp(max=num_candidates - 1)[:, None]).squeeze(1)
    threshold = torch.where(truncation.top_p < 1, torch.maximum(floor, edge), floor)
    is_enough = is_nucleus_inside & (candidates[:, -1] < threshold)
    if num_candidates == vocab_size:
        is_enough = torch.ones_like(is_enough)
    return threshold, is_enough


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums of rows in float64, in an order that the number of rows does not change: [num_rows]."""
    num_rows, width = values.shape
    whole = width // _SUM_WIDTH * _SUM_WIDTH
    parts = values[:, :whole].view(num_rows, -1, _SUM_WIDTH).sum(-1)
    parts = torch.cat((parts, values[:, whole:].sum(-1, keepdim=True)), dim=1)
    return parts.cumsum(1, dtype=torch.float64)[:, -1]
