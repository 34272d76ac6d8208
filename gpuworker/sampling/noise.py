"""Gumbel noise as a function of (seed, position, token id), with no state.

Counter-based: SplitMix64 (Steele, Lea, Flood 2014) whose stream is keyed by seed and position and
indexed by token id. The n-th token of a request therefore gets the same noise alone, in a batch,
after a preemption and on another worker.
"""

import torch

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise.

    Args:
        seeds: [num_rows] int64, the bits of an unsigned seed.
        positions: [num_rows] int64, how many output tokens precede.
        token_ids: [num_rows or 1, num_tokens] int64.

    Returns:
        [num_rows, num_tokens] float64, finite.
    """
    keys = _mix(_mix(seeds) + (positions + 1) * _GOLDEN)
    bits = _mix(keys[:, None] + token_ids * _GOLDEN)
    # The upper 53 bits, in the middle of their interval: never 0 and never 1.
    uniform = (_shift(bits, 11).double() + 0.5) * 2.0**-53
    return uniform.log_().neg_().log_().neg_()


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift that brings in zeros, which torch has not for signed integers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
