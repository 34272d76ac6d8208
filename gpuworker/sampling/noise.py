"""Gumbel noise as a function of (seed, position, token id), with no state.

The generator is counter-based: SplitMix64 (Steele, Lea, Flood 2014) keyed by seed and position and
indexed by token id. The n-th token of a request therefore gets the same noise alone, in a batch,
after a preemption and on another worker.
"""

import torch

# On average two tokens lie within the margin of the best; about one row in millions has more than
# this many.
_NUM_FINALISTS = 16
_LAST = (1 << 53) - 1
_LARGEST_REST = 1 - 2.0**-24

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        seeds: [num_rows] int64, the bits of an unsigned seed.
        positions: [num_rows] int64, number of output tokens before the sample.
        token_ids: [num_rows or 1, num_tokens] int64.

    Returns:
        [num_rows, num_tokens] float64, finite.
    """
    return _noise(_random_bits(seeds, positions, token_ids))


def gumbel_argmax(
    scaled: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The token that maximizes scaled + gumbel, over the whole vocabulary: [num_rows] int64.

    The noise is first computed in float32, which is several times faster. Only the tokens that may
    be the best within the float32 error are recomputed in float64. The result equals that of
    float64 throughout.

    Args:
        scaled: [num_rows, vocab_size] float32.
        seeds: [num_rows], as for `gumbel`.
        positions: [num_rows], as for `gumbel`.
    """
    every = torch.arange(scaled.shape[1], device=scaled.device)[None]
    bits = _random_bits(seeds, positions, every)
    rough, ids = (_rough_noise(bits) + scaled).topk(min(_NUM_FINALISTS, scaled.shape[1]), dim=-1)
    exact = _noise(bits.gather(1, ids)).add_(scaled.gather(1, ids))
    best = ids.gather(1, exact.argmax(-1, keepdim=True)).squeeze(1)
    # Comparisons with NaN are false, so a row with NaN counts as unsure.
    is_sure = rough[:, -1] < rough[:, 0] - _rough_margin(rough[:, 0])
    unsure = (~is_sure).nonzero().squeeze(1)
    if len(unsure) and scaled.shape[1] > _NUM_FINALISTS:
        best[unsure] = _noise(bits[unsure]).add_(scaled[unsure]).argmax(-1)
    return best


def _random_bits(
    seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """53 random bits for each token, as int64."""
    keys = _mix(_mix(seeds) + (positions + 1) * _GOLDEN)
    return _shift(_mix(keys[:, None] + token_ids * _GOLDEN), 11)


def _noise(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise in float64; the + 0.5 keeps the uniform away from 0 and 1."""
    uniform = (bits.double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _rough_noise(bits: torch.Tensor) -> torch.Tensor:
    """Gumbel noise in float32, exact to rounding above -2.8; smaller noise is raised to -2.8.

    Computed from 1 - uniform: large noise comes from a uniform near 1, where float32 is too coarse.
    """
    rest = (_LAST - bits).float().add_(0.5).mul_(2.0**-53).clamp_(max=_LARGEST_REST)
    return rest.neg_().log1p_().neg_().log_().neg_()


def _rough_margin(best: torch.Tensor) -> torch.Tensor:
    """How far below the best float32 score the token with the best float64 score may be."""
    # 0.85 covers the raise from float64's least noise, -3.6, to -2.8; the rest covers rounding.
    return 0.85 + best.abs() * 1e-5


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift (zero fill); torch has only the arithmetic shift for signed integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
