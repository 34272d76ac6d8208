"""How a config.json says which rotary embedding a model has."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpuworker.models.config import Rope, RopeScaling
from gpuworker.models.errors import UnsupportedModelError

HfConfig = Mapping[str, Any]


def rope_config(hf: HfConfig, head_dim: int) -> Rope:
    """The rope of a configuration; `rope_parameters` is `rope_scaling` with the base, newer.

    Raises:
        UnsupportedModelError: a kind of scaling that the decoder does not have.
    """
    parameters = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    base = float(parameters.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    partial = parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    scale = _KINDS.get(kind)
    if scale is None:
        raise UnsupportedModelError(
            f"rope type {kind!r} is not supported; supported are: " + ", ".join(_KINDS)
        )
    return scale(Rope(base=base, rotary_dim=int(head_dim * float(partial))), parameters, hf)


def _default(rope: Rope, _parameters: HfConfig, _hf: HfConfig) -> Rope:
    return rope


def _linear(rope: Rope, parameters: HfConfig, _hf: HfConfig) -> Rope:
    return replace(rope, linear_factor=float(parameters["factor"]))


def _llama3(rope: Rope, parameters: HfConfig, _hf: HfConfig) -> Rope:
    scaling = RopeScaling(
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
    )
    return replace(rope, scaling=scaling)


def _longrope(rope: Rope, parameters: HfConfig, hf: HfConfig) -> Rope:
    """Phi's: divisors for short and for long contexts, and sharper attention (LongRoPE, 2024)."""
    extended = int(hf["max_position_embeddings"])
    original = int(
        parameters.get("original_max_position_embeddings")
        or hf.get("original_max_position_embeddings")
        or extended
    )
    factor = extended / original
    sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        rope,
        frequency_divisors=tuple(map(float, parameters["short_factor"])),
        long_frequency_divisors=tuple(map(float, parameters["long_factor"])),
        original_max_position=original,
        attention_factor=float(parameters.get("attention_factor") or sharpness),
    )


_KINDS: dict[str, Callable[[Rope, HfConfig, HfConfig], Rope]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
}
