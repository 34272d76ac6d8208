"""Truncation: which tokens may be drawn, by min_p, then top_k, then top_p over the rest.

All three become thresholds on a row's scaled logits, so that tokens that tie at the threshold are
all kept or all dropped. A row's threshold never depends on other rows: the code uses only
order-independent reductions, sorts, and sums in a fixed order.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Torch sums rows of this width in a fixed order for any number of rows. A single row as wide as the
# vocabulary would be divided among threads, which changes the order.
_SUM_WIDTH = 256
_NUM_SLICES = 4096
_MAX_SORTED = 1024


@dataclass(frozen=True, slots=True)
class Truncation:
    """Settings of some rows, each [num_rows]; 1, 0 and 0 turn top_p, top_k and min_p off."""

    top_p: torch.Tensor  # float64
    top_k: torch.Tensor  # int64
    min_p: torch.Tensor  # float64

    @staticmethod
    def of_numbers(numbers: Mapping[str, torch.Tensor]) -> "Truncation":
        """Selects the truncation settings from the columns of Stage.DRAW, by name."""
        return Truncation(numbers["top_p"], numbers["top_k"].long(), numbers["min_p"])

    @property
    def is_off(self) -> torch.Tensor:
        return (self.top_p >= 1) & (self.top_k <= 0) & (self.min_p <= 0)

    def of(self, rows: torch.Tensor) -> "Truncation":
        """The settings of some of the rows."""
        return Truncation(self.top_p[rows], self.top_k[rows], self.min_p[rows])


def thresholds(
    scaled: torch.Tensor, candidates: torch.Tensor, truncation: Truncation
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest scaled logit that may be drawn in each row, if the candidates determine it.

    Args:
        scaled: [num_rows, vocab_size] float32 logits divided by temperature.
        candidates: [num_rows, num_candidates] the largest logits of each row, descending.
        truncation: settings of each row.

    Returns:
        [num_rows] float32 thresholds, and [num_rows] whether every drawable token is a candidate;
        the threshold of any other row is invalid.
    """
    vocab_size, num_candidates = scaled.shape[1], candidates.shape[1]
    largest, smallest = candidates[:, :1], candidates[:, -1]
    floor = _min_p_floor(largest[:, 0], truncation.min_p)
    top_k = torch.where(truncation.top_k > 0, truncation.top_k, vocab_size)
    kth = candidates.gather(1, (top_k.clamp(max=num_candidates) - 1)[:, None]).squeeze(1)
    # A row without top_k keeps all tokens. If top_k exceeds the number of candidates, the total
    # mass that top_p is a fraction of is unknown.
    floor = torch.where(top_k < vocab_size, torch.maximum(floor, kth), floor)
    is_floor_known = (top_k <= num_candidates) | (top_k >= vocab_size)

    mass = (candidates - largest).exp_().masked_fill_(candidates < floor[:, None], 0.0)
    mass = mass.cumsum(1, dtype=torch.float64)
    total = mass[:, -1].clone()
    # Rows in which tokens outside the candidates may reach the floor: their mass counts, too.
    is_open = (floor <= smallest) & (truncation.top_p < 1) & is_floor_known
    is_open &= num_candidates < vocab_size
    rows = is_open.nonzero().squeeze(1)
    if len(rows):
        weights = (scaled[rows] - largest[rows]).exp_()
        total[rows] = _row_sums(weights.masked_fill_(scaled[rows] < floor[rows, None], 0.0))
    index = (mass < (truncation.top_p * total)[:, None]).sum(1)
    is_nucleus_inside = (index < num_candidates) | (truncation.top_p >= 1)
    edge = candidates.gather(1, index.clamp(max=num_candidates - 1)[:, None]).squeeze(1)
    threshold = torch.where(truncation.top_p < 1, torch.maximum(floor, edge), floor)
    is_enough = is_floor_known & is_nucleus_inside & (smallest < threshold)
    return threshold, is_enough | (num_candidates == vocab_size)


def exact_thresholds(scaled: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """The smallest scaled logit that may be drawn in each row: [num_rows] float32.

    For rows in which many tokens may be drawn. The cost is a few passes over each row; at most
    _MAX_SORTED distinct values are sorted.

    Args:
        scaled: as for `thresholds`.
        truncation: settings of each row.
    """
    vocab_size = scaled.shape[1]
    settings = zip(
        truncation.top_k.tolist(), truncation.top_p.tolist(), truncation.min_p, strict=True
    )
    edges = []
    for row, (top_k, top_p, min_p) in zip(scaled, settings, strict=True):
        floor = _min_p_floor(row.max(), min_p)
        if 0 < top_k < vocab_size:
            floor = torch.maximum(floor, row.kthvalue(vocab_size - top_k + 1).values)
        if top_p < 1:
            # The clamp excludes forbidden tokens (-inf). NaN stays, as NaN compares below nothing.
            is_below = row < floor.clamp(min=torch.finfo(row.dtype).min)
            floor = torch.maximum(floor, _nucleus_edge(row[~is_below], top_p))
        edges.append(floor)
    return torch.stack(edges)


def _min_p_floor(largest: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The scaled logit of a token with min_p times the likeliest token's probability."""
    return (largest.double() + min_p.log()).float()


def _nucleus_edge(values: torch.Tensor, top_p: float) -> torch.Tensor:
    """The smallest value of the top_p nucleus, a scalar.

    Repeatedly cuts the range of values into slices and continues with the slice in which the
    cumulative mass reaches top_p.
    """
    weights = (values - values.max()).exp_().double()
    wanted = top_p * weights.sum()
    above = torch.zeros_like(wanted)
    while len(values) > _MAX_SORTED and (low := values.min()) < (high := values.max()) < torch.inf:
        # Rounding is monotonic, so a larger value never lands in a slice of smaller values.
        slices = ((high - values) / (high - low) * _NUM_SLICES).long().clamp_(0, _NUM_SLICES - 1)
        mass = torch.bincount(slices, weights, minlength=_NUM_SLICES).cumsum(0) + above
        number = (mass < wanted).sum().clamp_(max=_NUM_SLICES - 1)
        above = torch.where(number > 0, mass[number - 1], above)
        is_inside = slices == number
        values, weights = values[is_inside], weights[is_inside]
    values, order = values.sort(descending=True)
    mass = weights[order].cumsum(0) + above
    return values[(mass < wanted).sum().clamp_(max=len(values) - 1)]


def _row_sums(values: torch.Tensor) -> torch.Tensor:
    """Sums rows in float64, in an order independent of the number of rows: [num_rows]."""
    num_rows, width = values.shape
    whole = width // _SUM_WIDTH * _SUM_WIDTH
    parts = values[:, :whole].view(num_rows, -1, _SUM_WIDTH).sum(-1)
    parts = torch.cat((parts, values[:, whole:].sum(-1, keepdim=True)), dim=1)
    return parts.cumsum(1, dtype=torch.float64)[:, -1]
