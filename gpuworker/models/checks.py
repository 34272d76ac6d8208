"""Checks the values in a model's files before any allocation depends on them.

Bounds are far beyond any existing model, yet small enough that no value makes a loop or a table
large. Keys that are not listed here are not read as numbers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuworker.models.config import LayerConfig, ModelConfig, Rope
from gpuworker.models.errors import WeightError


@dataclass(frozen=True, slots=True)
class _Integer:
    low: int
    high: int

    def has(self, value: Any) -> bool:
        return _is_integer(value) and self.low <= value <= self.high

    def __str__(self) -> str:
        return f"an integer from {self.low} to {self.high}"


@dataclass(frozen=True, slots=True)
class _Number:
    """A number in (low, high]."""

    low: float
    high: float

    def has(self, value: Any) -> bool:
        return (_is_integer(value) or isinstance(value, float)) and self.low < value <= self.high

    def __str__(self) -> str:
        return f"a number above {self.low:g} and up to {self.high:g}"


_LAYERS = _Integer(1, 4096)
_WIDTH = _Integer(1, 1 << 20)
_HEADS = _Integer(1, 1 << 14)
_HEAD_DIM = _Integer(2, 1 << 12)
_CONTEXT = _Integer(1, 1 << 24)
_EXPERTS = _Integer(0, 1 << 12)
_TOKEN_ID = _Integer(0, (1 << 24) - 1)
_EPSILON = _Number(0, 1)
_ROPE_BASE = _Number(1, 1e12)
_FACTOR = _Number(0, 1e6)

_Bounds = Mapping[str, _Integer | _Number]
# Keys of config.json, of the rope_parameters in it, and of generation_config.json.
HF_BOUNDS: _Bounds = {
    "vocab_size": _Integer(1, 1 << 24),
    "hidden_size": _WIDTH,
    "intermediate_size": _Integer(1, 1 << 24),
    "moe_intermediate_size": _Integer(1, 1 << 24),
    "num_hidden_layers": _LAYERS,
    "max_window_layers": _Integer(0, 4096),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": _CONTEXT,
    "original_max_position_embeddings": _CONTEXT,
    "sliding_window": _CONTEXT,
    "sliding_window_pattern": _LAYERS,
    "_sliding_window_pattern": _LAYERS,
    "no_rope_layer_interval": _LAYERS,
    "decoder_sparse_step": _LAYERS,
    "num_experts": _EXPERTS,
    "num_local_experts": _EXPERTS,
    "num_experts_per_tok": _EXPERTS,
    "rms_norm_eps": _EPSILON,
    "query_pre_attn_scalar": _FACTOR,
    "attn_logit_softcapping": _FACTOR,
    "final_logit_softcapping": _FACTOR,
    "rope_theta": _ROPE_BASE,
    "rope_local_base_freq": _ROPE_BASE,
    "partial_rotary_factor": _Number(0, 1),
    "factor": _FACTOR,
    "low_freq_factor": _FACTOR,
    "high_freq_factor": _FACTOR,
    "beta_fast": _FACTOR,
    "beta_slow": _FACTOR,
    "attention_factor": _FACTOR,
    "short_factor": _FACTOR,
    "long_factor": _FACTOR,
    "mscale": _Number(-1e6, 1e6),
    "mscale_all_dim": _Number(-1e6, 1e6),
    "eos_token_id": _TOKEN_ID,
}
# GGUF keys, without their architecture prefix.
GGUF_BOUNDS: _Bounds = {
    "block_count": _LAYERS,
    "embedding_length": _WIDTH,
    "feed_forward_length": _Integer(1, 1 << 24),
    "expert_feed_forward_length": _Integer(1, 1 << 24),
    "context_length": _CONTEXT,
    "attention.head_count": _HEADS,
    "attention.head_count_kv": _HEADS,
    "attention.key_length": _HEAD_DIM,
    "attention.layer_norm_rms_epsilon": _EPSILON,
    "attention.sliding_window": _CONTEXT,
    "attn_logit_softcapping": _FACTOR,
    "final_logit_softcapping": _FACTOR,
    "expert_count": _EXPERTS,
    "expert_used_count": _EXPERTS,
    "rope.freq_base": _ROPE_BASE,
    "rope.dimension_count": _HEAD_DIM,
    "rope.scale_linear": _FACTOR,
    "rope.scaling.factor": _FACTOR,
    "rope.scaling.attn_factor": _FACTOR,
    "rope.scaling.original_context_length": _CONTEXT,
    "rope.scaling.yarn_beta_fast": _FACTOR,
    "rope.scaling.yarn_beta_slow": _FACTOR,
    "tokenizer.ggml.eos_token_id": _TOKEN_ID,
    "tokenizer.ggml.eot_token_id": _TOKEN_ID,
}
# Keys whose values may be lists of such numbers, and keys whose values are mappings of such keys.
_LISTS = {"eos_token_id", "short_factor", "long_factor"}
_NESTED = {"rope_parameters", "rope_scaling", "full_attention", "sliding_attention"}


def check_values(file: str, values: Mapping[str, Any], bounds: _Bounds, prefix: str = "") -> None:
    """Checks type and range of every value that is read as a number, and of each list member.

    Args:
        file: the file's name, for messages.
        values: by key; None counts as missing.
        bounds: by key, without the prefix.
        prefix: optional prefix of keys in `values`.

    Raises:
        WeightError: a value has a wrong type or is out of range; the message names file and key.
    """
    for key, value in values.items():
        if isinstance(value, Mapping) and key in _NESTED:
            check_values(file, value, bounds)
        allowed = bounds.get(key.removeprefix(prefix))
        if allowed is None or value is None:
            continue
        is_list = isinstance(value, list) and key in _LISTS
        for number in value if is_list else [value]:
            if not allowed.has(number):
                raise WeightError(f"{file}: {key} is {_shown(number)}; it must be {allowed}")


def check_config(file: str, config: ModelConfig, eos_token_ids: tuple[int, ...]) -> None:
    """Checks that values are consistent with each other.

    Raises:
        WeightError: values contradict each other; the message names file and values.
    """
    attention = config.attention
    if attention.num_heads % attention.num_kv_heads:
        raise WeightError(
            f"{file}: {attention.num_heads} attention heads are no multiple of "
            f"{attention.num_kv_heads} KV heads"
        )
    if not math.isfinite(attention.scale) or not math.isfinite(config.embedding_scale):
        raise WeightError(f"{file}: the scale of attention or embedding is no number")
    for token_id in eos_token_ids:
        if not 0 <= token_id < config.vocab_size:
            raise WeightError(
                f"{file}: the end-of-sequence token {token_id} is not in the vocabulary of "
                f"{config.vocab_size}"
            )
    for layer in config.layers:
        _check_layer(file, layer, attention.head_dim)


def _check_layer(file: str, layer: LayerConfig, head_dim: int) -> None:
    if layer.sliding_window is not None and layer.sliding_window < 1:
        raise WeightError(f"{file}: sliding_window is {layer.sliding_window}; it must be positive")
    experts = layer.experts
    if experts is not None and not 0 < experts.num_per_token <= experts.num_experts:
        raise WeightError(
            f"{file}: {experts.num_per_token} experts a token of {experts.num_experts} experts"
        )
    if layer.rope is not None:
        _check_rope(file, layer.rope, head_dim)


def _check_rope(file: str, rope: Rope, head_dim: int) -> None:
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise WeightError(
            f"{file}: the rotary embedding turns {rope.rotary_dim} of {head_dim} dimensions; they "
            "must be an even number"
        )
    for divisors in (rope.frequency_divisors, rope.long_frequency_divisors):
        if divisors and len(divisors) != rope.rotary_dim // 2:
            raise WeightError(
                f"{file}: {len(divisors)} divisors of rope frequencies for "
                f"{rope.rotary_dim // 2} frequencies"
            )
        if not all(_FACTOR.has(divisor) for divisor in divisors):
            raise WeightError(f"{file}: a divisor of rope frequencies is not {_FACTOR}")


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value for a message; a large value is cut to its beginning."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "…"
