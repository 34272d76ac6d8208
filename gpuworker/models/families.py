"""Builds a ModelConfig from a Hugging Face config.json, one builder per model family."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from gpuworker.models.config import AttentionConfig, ExpertsConfig, LayerConfig, ModelConfig, Rope
from gpuworker.models.errors import UnsupportedModelError
from gpuworker.models.rope_config import HfConfig, context_length, rope_config


def model_config(hf: HfConfig) -> ModelConfig:
    """The decoder's configuration from a config.json.

    Raises:
        UnsupportedModelError: the decoder does not support the architecture or an option.
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
    """Supported values of config.json's `architectures`, sorted."""
    return sorted(_BUILDERS)


def _base(hf: HfConfig, family: str) -> ModelConfig:
    """The configuration that all families share; each builder replaces the fields that differ."""
    num_heads = int(hf["num_attention_heads"])
    head_dim = int(hf.get("head_dim") or hf["hidden_size"] // num_heads)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=int(hf.get("num_key_value_heads") or num_heads),
        head_dim=head_dim,
        scale=1.0 / math.sqrt(head_dim),
    )
    return ModelConfig(
        family=family,
        vocab_size=int(hf["vocab_size"]),
        hidden_size=int(hf["hidden_size"]),
        intermediate_size=int(hf["intermediate_size"]),
        layers=_layers(hf, lambda _: rope_config(hf, head_dim)),
        attention=attention,
        norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
        max_model_len=context_length(hf),
        tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        activation=_activation(hf),
    )


def _layers(hf: HfConfig, rope_of: Callable[[bool], Rope]) -> tuple[LayerConfig, ...]:
    """Layers by `layer_types`; without that key, every layer has `sliding_window`, if any.

    Args:
        hf: the configuration.
        rope_of: returns a layer's rope, given whether the layer has a window.
    """
    num_layers = int(hf["num_hidden_layers"])
    window = hf.get("sliding_window")
    kinds = hf.get("layer_types")
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * num_layers
    if len(kinds) != num_layers:
        raise UnsupportedModelError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    layers = []
    for kind in kinds:
        if kind not in {"full_attention", "sliding_attention"}:
            raise UnsupportedModelError(f"layer type {kind!r} is not supported")
        has_window = kind == "sliding_attention"
        layers.append(
            LayerConfig(
                rope=rope_of(has_window), sliding_window=int(window or 0) if has_window else None
            )
        )
    return tuple(layers)


def _attention(config: ModelConfig, hf: HfConfig, **changes: Any) -> AttentionConfig:
    """The attention of a family in which `attention_bias` adds biases to all four products."""
    has_bias = bool(hf.get("attention_bias", False))
    return replace(config.attention, qkv_bias=has_bias, output_bias=has_bias, **changes)


def _activation(hf: HfConfig) -> Any:
    # Gemma's older files have both keys; hidden_activation is the valid one.
    name = str(hf.get("hidden_activation") or hf.get("hidden_act") or "silu")
    names = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
    if name not in names:
        raise UnsupportedModelError(
            f"hidden_act {name!r} is not supported; supported are: " + ", ".join(names)
        )
    return names[name]


def _llama(hf: HfConfig) -> ModelConfig:
    # Llama has no sliding windows, even if the file has these keys.
    config = _base({**hf, "sliding_window": None, "layer_types": None}, "llama")
    return replace(
        config, attention=_attention(config, hf), mlp_bias=bool(hf.get("mlp_bias", False))
    )


def _qwen2(hf: HfConfig) -> ModelConfig:
    config = _base(_with_qwen_windows(hf), "qwen2")
    return replace(config, attention=replace(config.attention, qkv_bias=True))


def _qwen3(hf: HfConfig) -> ModelConfig:
    config = _base({"head_dim": 128, **_with_qwen_windows(hf)}, "qwen3")
    return replace(config, attention=_attention(config, hf, has_qk_norm=True))


def _with_qwen_windows(hf: HfConfig) -> HfConfig:
    """Adds layer_types to older files: layers from max_window_layers on have a window, if used."""
    if not hf.get("use_sliding_window", False):
        return {**hf, "sliding_window": None, "layer_types": None}
    if hf.get("layer_types") is not None:
        return hf
    num_layers, first = int(hf["num_hidden_layers"]), int(hf.get("max_window_layers", 28))
    kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return {**hf, "layer_types": kinds}


def _mixtral(hf: HfConfig) -> ModelConfig:
    config = _base(hf, "mixtral")
    experts = ExpertsConfig(
        num_experts=int(hf["num_local_experts"]),
        num_per_token=int(hf["num_experts_per_tok"]),
        intermediate_size=config.intermediate_size,
        is_normalized=True,
    )
    return replace(config, layers=tuple(replace(layer, experts=experts) for layer in config.layers))


def _qwen3_moe(hf: HfConfig) -> ModelConfig:
    config = replace(_qwen3(hf), family="qwen3_moe")
    experts = ExpertsConfig(
        num_experts=int(hf.get("num_experts") or hf["num_local_experts"]),
        num_per_token=int(hf["num_experts_per_tok"]),
        intermediate_size=int(hf["moe_intermediate_size"]),
        is_normalized=bool(hf.get("norm_topk_prob", False)),
    )
    dense, step = hf.get("mlp_only_layers") or [], int(hf.get("decoder_sparse_step", 1))
    layers = [
        layer if i in dense or (i + 1) % step else replace(layer, experts=experts)
        for i, layer in enumerate(config.layers)
    ]
    return replace(config, layers=tuple(layers))


def _smollm3(hf: HfConfig) -> ModelConfig:
    config = _base({"tie_word_embeddings": True, **_with_qwen_windows(hf)}, "smollm3")
    uses_rope = hf.get("no_rope_layers")
    if uses_rope is None:
        interval = int(hf.get("no_rope_layer_interval", 4))
        uses_rope = [(i + 1) % interval != 0 for i in range(len(config.layers))]
    layers = [
        layer if uses else replace(layer, rope=None)
        for layer, uses in zip(config.layers, uses_rope, strict=True)
    ]
    return replace(
        config,
        layers=tuple(layers),
        attention=_attention(config, hf),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


def _gemma2(hf: HfConfig) -> ModelConfig:
    if hf.get("layer_types") is None:
        kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(_depth(hf))]
        hf = {**hf, "layer_types": kinds}
    return _gemma(hf, "gemma2", has_qk_norm=False)


def _gemma3(hf: HfConfig) -> ModelConfig:
    if hf.get("layer_types") is None:
        period = int(hf.get("sliding_window_pattern") or hf.get("_sliding_window_pattern") or 6)
        kinds = [
            "sliding_attention" if (i + 1) % period else "full_attention" for i in range(_depth(hf))
        ]
        hf = {**hf, "layer_types": kinds}
    config = _gemma(hf, "gemma3", has_qk_norm=True)
    ropes = _gemma3_ropes(hf, config.attention.head_dim)
    return replace(config, layers=_layers(hf, lambda has_window: ropes[has_window]))


def _gemma3_ropes(hf: HfConfig, head_dim: int) -> dict[bool, Rope]:
    """Ropes by whether a layer has a window; newer files list ropes by layer type."""
    parameters = hf.get("rope_parameters") or {}
    if "full_attention" in parameters:
        return {
            has_window: rope_config({"rope_parameters": parameters[kind]}, head_dim)
            for has_window, kind in ((False, "full_attention"), (True, "sliding_attention"))
        }
    local = {"rope_theta": hf.get("rope_local_base_freq", 10000.0)}
    return {
        False: rope_config({"rope_theta": 1000000.0, **hf}, head_dim),
        True: rope_config(local, head_dim),
    }


def _gemma(hf: HfConfig, family: str, *, has_qk_norm: bool) -> ModelConfig:
    defaults = {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
    # Gemma 3 may nest ropes by layer type; `_gemma3_ropes` reads those.
    flat = {**defaults, **hf, "rope_parameters": None} if family == "gemma3" else defaults | {**hf}
    config = _base(flat, family)
    soft_cap = hf.get("attn_logit_softcapping")
    return replace(
        config,
        attention=_attention(
            config,
            hf,
            scale=float(hf.get("query_pre_attn_scalar", 256)) ** -0.5,
            soft_cap=None if soft_cap is None else float(soft_cap),
            has_qk_norm=has_qk_norm,
        ),
        norm_offset=1.0,
        has_post_norms=True,
        embedding_scale=float(hf["hidden_size"]) ** 0.5,
        final_soft_cap=hf.get("final_logit_softcapping"),
    )


def _depth(hf: HfConfig) -> int:
    return int(hf["num_hidden_layers"])


_BUILDERS: dict[str, Callable[[HfConfig], ModelConfig]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": partial(_base, family="mistral"),
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "SmolLM3ForCausalLM": _smollm3,
    "Phi3ForCausalLM": partial(_base, family="phi3"),
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "MixtralForCausalLM": _mixtral,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}
