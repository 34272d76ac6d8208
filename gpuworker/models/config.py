"""The configuration of a decoder-only model, independent of the file format.

Model families differ by values here, never by code. `families` builds a configuration from a file's
metadata.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """The llama3 rule: stretches long wavelengths, keeps short ones and interpolates between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of one kind of layer.

    rotary_dim: leading dimensions of a head that are rotated; the others are unchanged.
    linear_factor: divides positions.
    frequency_divisors: [rotary_dim / 2] or empty; divides frequencies elementwise.
    long_frequency_divisors: replaces frequency_divisors if max_model_len exceeds
        original_max_position.
    attention_factor: multiplies the cosines and sines.
    """

    base: float
    rotary_dim: int
    linear_factor: float = 1.0
    scaling: RopeScaling | None = None
    frequency_divisors: tuple[float, ...] = ()
    long_frequency_divisors: tuple[float, ...] = ()
    original_max_position: int = 0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention parameters that all layers share; LayerConfig has those that differ."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    soft_cap: float | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    has_qk_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A layer's mixture of experts; is_normalized: a token's expert weights sum to 1."""

    num_experts: int
    num_per_token: int
    intermediate_size: int
    is_normalized: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer.

    rope: None means no rotary embedding.
    sliding_window: None means that a query sees its whole context.
    experts: None means one MLP of the model's intermediate_size.
    """

    rope: Rope | None
    sliding_window: int | None = None
    experts: ExpertsConfig | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder: layers of attention and gated MLP between an embedding and a head.

    norm_offset: added to every norm weight read from a file (Gemma stores weight - 1).
    has_post_norms: attention and MLP outputs are normed before they are added to the residual.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig
    norm_eps: float
    max_model_len: int
    tie_embeddings: bool
    activation: Literal["silu", "gelu_tanh"] = "silu"
    mlp_bias: bool = False
    norm_offset: float = 0.0
    has_post_norms: bool = False
    embedding_scale: float = 1.0
    final_soft_cap: float | None = None
