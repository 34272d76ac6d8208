"""How a Hugging Face config.json becomes a ModelConfig, family by family."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpuworker.models.config import (
    AttentionConfig,
    LayerConfig,
    ModelConfig,
    Rope,
    RopeScaling,
)
from gpuworker.models.errors import UnsupportedModelError

HfConfig = Mapping[str, Any]


def model_config(hf: HfConfig) -> ModelConfig:
    """What the decoder needs to know, from a config.json.

    Raises:
        UnsupportedModelError: an architecture or option that the decoder does not have.
    """
    architectures = hf.get("architectures") or ["(none named)"]
    build = _BUILDERS.get(architectures[0])
    if build is None:
        raise UnsupportedModelError(
            f"architecture {architectures[0]!r} is not supported; supported are: "
            + ", ".join(supported_architectures())
        )
    return build(hf)


def supported_architectures() -> list[str]:
    """Names as in config.json's `architectures`, sorted."""
    return sorted(_BUILDERS)


def _base(hf: HfConfig, family: str) -> ModelConfig:
    """What all families share; a builder replaces the rest."""
    num_heads = int(hf["num_attention_heads"])
    head_dim = int(hf.get("head_dim") or hf["hidden_size"] // num_heads)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        scale=1.0 / math.sqrt(head_dim),
    )
    layer = LayerConfig(rope=_rope(hf, head_dim))
    return ModelConfig(
        family=family,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        layers=(layer,) * int(hf["num_hidden_layers"]),
        attention=attention,
        norm_eps=float(hf["rms_norm_eps"]),
        max_model_len=int(hf["max_position_embeddings"]),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        activation=_activation(str(hf.get("hidden_act", "silu"))),
    )


def _activation(name: str) -> Any:
    names = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in names:
        raise UnsupportedModelError(
            f"hidden_act {name!r} is not supported; supported are: " + ", ".join(names)
        )
    return names[name]


def _rope(hf: HfConfig, head_dim: int) -> Rope:
    """Rotary parameters; `rope_parameters` is `rope_scaling` with the base, newer."""
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    base = float(scaling.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    partial = scaling.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    rope = Rope(base=base, rotary_dim=int(head_dim * float(partial)))
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return rope
    if kind == "linear":
        return replace(rope, linear_factor=float(scaling["factor"]))
    if kind == "llama3":
        llama3 = RopeScaling(
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position=int(scaling["original_max_position_embeddings"]),
        )
        return replace(rope, scaling=llama3)
    raise UnsupportedModelError(
        f"rope type {kind!r} is not supported; supported are: default, linear, llama3"
    )


def _llama(hf: HfConfig) -> ModelConfig:
    config = _base(hf, "llama")
    has_bias = bool(hf.get("attention_bias", False))
    return replace(
        config,
        attention=replace(config.attention, qkv_bias=has_bias, output_bias=has_bias),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


_BUILDERS: dict[str, Callable[[HfConfig], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
}
