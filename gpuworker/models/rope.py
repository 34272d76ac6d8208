"""Rotary position embedding: tables made once, applied in three operations."""

import math

import torch

from gpuworker.models.config import Rope, RopeScaling


class RopeTable:
    """Cosines and sines of every position, [max_model_len, rotary_dim], halves repeated."""

    def __init__(self, rope: Rope, max_model_len: int, device: torch.device) -> None:
        frequencies = _inverse_frequencies(rope, max_model_len)
        positions = torch.arange(max_model_len, dtype=torch.float32) / rope.linear_factor
        angles = torch.outer(positions, frequencies)
        self._rotary_dim = rope.rotary_dim
        self._cos = (torch.cat((angles, angles), -1).cos() * rope.attention_factor).to(device)
        self._sin = (angles.sin() * rope.attention_factor).to(device)

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> "RopeStep":
        """The rows that a step needs; positions is [num_tokens]."""
        cos = self._cos.index_select(0, positions).to(dtype).unsqueeze(1)
        sin = self._sin.index_select(0, positions).to(dtype).unsqueeze(1)
        return RopeStep(cos, sin, self._rotary_dim)


class RopeStep:
    """Rotation of one step's heads, shared by all layers of one kind."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> None:
        self._cos = cos  # [num_tokens, 1, rotary_dim]
        self._sin = sin  # [num_tokens, 1, rotary_dim / 2]
        self._rotary_dim = rotary_dim

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """A rotated copy of heads, [num_tokens, num_heads, head_dim] (first half with second)."""
        if self._rotary_dim == heads.shape[-1]:
            return self._turn(heads)
        turned = self._turn(heads[..., : self._rotary_dim])
        return torch.cat((turned, heads[..., self._rotary_dim :]), dim=-1)

    def _turn(self, heads: torch.Tensor) -> torch.Tensor:
        half = self._rotary_dim // 2
        first, second = heads[..., :half], heads[..., half:]
        turned = heads * self._cos
        turned[..., :half].addcmul_(second, self._sin, value=-1)
        turned[..., half:].addcmul_(first, self._sin)
        return turned


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
