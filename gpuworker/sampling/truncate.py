"""Which tokens may be drawn: min_p, then top_k, then top_p over what they leave.

All three are thresholds on a row's scaled logits, so tokens that tie at the edge stay together, and
a row's threshold never depends on the other rows: only order-free reductions, sorts, and sums in an
order of their own are used.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Torch sums this many neighbours in one order, however many rows there are; a single row of a whole
# vocabulary it would share out among threads.
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
        """The settings among the numbers of Stage.DRAW, by name."""
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
    largest, smallest = candidates[:, :1], candidates[:, -1]
    floor = _min_p_floor(largest[:, 0], truncation.min_p)
    top_k = torch.where(truncation.top_k > 0, truncation.top_k, vocab_size)
    kth = candidates.gather(1, (top_k.clamp(max=num_candidates) - 1)[:, None]).squeeze(1)
    # A row without top_k keeps everything; of one whose top_k is past the candidates, they do not
    # tell how much top_p is a part of.
    floor = torch.where(top_k < vocab_size, torch.maximum(floor, kth), floor)
    is_floor_known = (top_k <= num_candidates) | (top_k >= vocab_size)

    mass = (candidates - largest).exp_().masked_fill_(candidates < floor[:, None], 0.0)
    mass = mass.cumsum(1, dtype=torch.float64)
    total = mass[:, -1].clone()
    # Where tokens behind the candidates are not below the floor, they count as well.
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
    """The smallest scaled logit of each row that may be drawn: [num_rows] float32.

    For rows of which many tokens may be drawn: it costs a few passes over a row, and sorts no more
    than _MAX_SORTED tokens that are not all the same.

    Args:
        scaled: as for `thresholds`.
        truncation: of each row.
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
            # Forbidden tokens have no place among the others, and NaN is not below anything.
            is_below = row < floor.clamp(min=torch.finfo(row.dtype).min)
            floor = torch.maximum(floor, _nucleus_edge(row[~is_below], top_p))
        edges.append(floor)
    return torch.stack(edges)


def _min_p_floor(largest: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The scaled logit of min_p times the likeliest token's probability."""
    return (largest.double() + min_p.log()).float()


def _nucleus_edge(values: torch.Tensor, top_p: float) -> torch.Tensor:
    """The last of the largest values whose mass reaches top_p of all: a scalar.

    The range that it lies in is cut into slices, again and again, by the mass above each slice.
    """
    weights = (values - values.max()).exp_().double()
    wanted = top_p * weights.sum()
    above = torch.zeros_like(wanted)
    while len(values) > _MAX_SORTED and (low := values.min()) < (high := values.max()) < torch.inf:
        # Rounding keeps the order of values, so a slice is never above a higher one.
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
    """Sums of rows in float64, in an order that the number of rows does not change: [num_rows]."""
    num_rows, width = values.shape
    whole = width // _SUM_WIDTH * _SUM_WIDTH
    parts = values[:, :whole].view(num_rows, -1, _SUM_WIDTH).sum(-1)
    parts = torch.cat((parts, values[:, whole:].sum(-1, keepdim=True)), dim=1)
    return parts.cumsum(1, dtype=torch.float64)[:, -1]
