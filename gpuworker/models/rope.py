"""Rotary position embedding: computes the tables of each kind once."""

import math

import torch

from gpuworker.kernels.ops import RopeTables
from gpuworker.models.config import Rope, RopeScaling
from gpuworker.models.errors import WeightError

# A million tokens times 128 dimensions, as in the models with the longest contexts.
_MAX_TABLE_VALUES = 1 << 27


def rope_tables(rope: Rope, max_model_len: int, device: torch.device) -> RopeTables:
    """Cosines and sines of every position.

    Raises:
        WeightError: the tables would have more than _MAX_TABLE_VALUES values.
    """
    if max_model_len * rope.rotary_dim > _MAX_TABLE_VALUES:
        raise WeightError(
            f"a context of {max_model_len} tokens needs rotary tables of "
            f"{max_model_len * rope.rotary_dim} values, at most {_MAX_TABLE_VALUES} are made: give "
            "a smaller max-model-len"
        )
    frequencies = _inverse_frequencies(rope, max_model_len)
    positions = torch.arange(max_model_len, dtype=torch.float32) / rope.linear_factor
    angles = torch.outer(positions, frequencies)
    return RopeTables(
        (angles.cos() * rope.attention_factor).to(device),
        (angles.sin() * rope.attention_factor).to(device),
    )


def _inverse_frequencies(rope: Rope, max_model_len: int) -> torch.Tensor:
    """[rotary_dim / 2] radians per position."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    frequencies = 1.0 / (rope.base**exponents)
    divisors = rope.frequency_divisors
    if rope.long_frequency_divisors and max_model_len > rope.original_max_position:
        divisors = rope.long_frequency_divisors
    if divisors:
        frequencies = frequencies / torch.tensor(divisors)
    if rope.scaling is not None:
        frequencies = _llama3_scaled(frequencies, rope.scaling)
    return frequencies


def _llama3_scaled(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1's context extension, by wavelength against the original context."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return frequencies * kept + frequencies / scaling.factor * (1 - kept)
