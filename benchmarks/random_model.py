"""A model with random weights, whose speed equals a trained model's."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from gpuworker.models.config import ExpertsConfig, LayerConfig, ModelConfig
from gpuworker.models.families import model_config
from gpuworker.models.source import WeightSource

Shapes = dict[str, tuple[int, ...]]


class RandomSource(WeightSource):
    """Weights by their Hugging Face names, drawn when read.

    Args:
        hf: the content of config.json.
        device: where weights are drawn; a GPU draws billions in seconds.
        dtype: the weights' type.
        seed: seed of the first tensor; each tensor has its own.
    """

    def __init__(
        self, hf: Mapping[str, Any], device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.config: ModelConfig = model_config(hf)
        self.eos_token_ids: tuple[int, ...] = ()
        self.dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self._shapes = _shapes(self.config)

    def names(self) -> set[str]:
        return set(self._shapes)

    def read(self, name: str) -> torch.Tensor:
        shape = self._shapes[name]
        drawn = torch.randn(shape, generator=self._generator, device=self._device, dtype=self.dtype)
        if len(shape) == 1:
            # Norm weights near those of trained models, biases near zero.
            center = 1.0 - self.config.norm_offset if "norm" in name else 0.0
            return drawn.mul_(0.1).add_(center)
        return drawn.div_(math.sqrt(shape[1]))


def _shapes(config: ModelConfig) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i, layer in enumerate(config.layers):
        of_layer = _attention(config) | _mlp(config, layer)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
    return shapes


def _attention(config: ModelConfig) -> Shapes:
    """Shapes of a layer's attention and norms."""
    attention, hidden = config.attention, config.hidden_size
    query, key = (
        heads * attention.head_dim for heads in (attention.num_heads, attention.num_kv_heads)
    )
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, query),
    }
    for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        shapes[f"self_attn.{name}.weight"] = (rows, hidden)
        if attention.qkv_bias:
            shapes[f"self_attn.{name}.bias"] = (rows,)
    if attention.output_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if attention.has_qk_norm:
        shapes |= {f"self_attn.{n}_norm.weight": (attention.head_dim,) for n in ("q", "k")}
    if config.has_post_norms:
        shapes |= {f"{place}_feedforward_layernorm.weight": (hidden,) for place in ("pre", "post")}
    return shapes


def _mlp(config: ModelConfig, layer: LayerConfig) -> Shapes:
    if layer.experts is None:
        return _gated("mlp", config, config.intermediate_size)
    experts: ExpertsConfig = layer.experts
    shapes: Shapes = {"mlp.gate.weight": (experts.num_experts, config.hidden_size)}
    for number in range(experts.num_experts):
        shapes |= _gated(f"mlp.experts.{number}", config, experts.intermediate_size)
    return shapes


def _gated(prefix: str, config: ModelConfig, size: int) -> Shapes:
    hidden = config.hidden_size
    shapes: Shapes = {}
    for name, shape in {
        "gate_proj": (size, hidden),
        "up_proj": (size, hidden),
        "down_proj": (hidden, size),
    }.items():
        shapes[f"{prefix}.{name}.weight"] = shape
        if config.mlp_bias:
            shapes[f"{prefix}.{name}.bias"] = shape[:1]
    return shapes
