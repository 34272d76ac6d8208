"""Reads a model's rotary embedding from a config.json."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gpuworker.models.config import Rope, RopeScaling
from gpuworker.models.errors import UnsupportedModelError

HfConfig = Mapping[str, Any]


def rope_config(hf: HfConfig, head_dim: int) -> Rope:
    """The rope of a configuration.

    Newer files have `rope_parameters`: the older `rope_scaling` plus the base `rope_theta`.

    Raises:
        UnsupportedModelError: the decoder does not support this kind of scaling.
    """
    parameters = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    base = float(parameters.get("rope_theta") or hf.get("rope_theta") or 10000.0)
    partial = parameters.get("partial_rotary_factor") or hf.get("partial_rotary_factor") or 1.0
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    scale = _KINDS.get(kind)
    if scale is None:
        raise unknown_rope_type(str(kind))
    return scale(Rope(base=base, rotary_dim=int(head_dim * float(partial))), parameters, hf)


def context_length(hf: HfConfig) -> int:
    """The model's context length in tokens, including YaRN's extension if enabled."""
    length = int(hf["max_position_embeddings"])
    parameters = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if (parameters.get("rope_type") or parameters.get("type")) != "yarn":
        return length
    # Users enable YaRN by editing the file and leave max_position_embeddings unchanged.
    return max(length, int(_original_length(parameters, hf) * (parameters.get("factor") or 1.0)))


def unknown_rope_type(kind: str) -> UnsupportedModelError:
    """The error for an unknown kind of scaling; the message lists the supported kinds."""
    return UnsupportedModelError(
        f"rope type {kind!r} is not supported; supported are: " + ", ".join(_KINDS)
    )


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


def _yarn(rope: Rope, parameters: HfConfig, hf: HfConfig) -> Rope:
    """Divides low frequencies, keeps high ones, interpolates between (Peng et al., YaRN, 2023)."""
    original = _original_length(parameters, hf)
    factor = float(parameters.get("factor") or int(hf["max_position_embeddings"]) / original)

    def dimension(num_turns: float) -> float:
        """The dimension whose frequency makes num_turns turns within the original context."""
        turns = math.log(original / (num_turns * 2 * math.pi))
        return rope.rotary_dim * turns / (2 * math.log(rope.base))

    low = dimension(float(parameters.get("beta_fast") or 32))
    high = dimension(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    ramp = [(i - low) / max(high - low, 0.001) for i in range(rope.rotary_dim // 2)]
    kept = [1 - min(max(part, 0.0), 1.0) for part in ramp]
    return replace(
        rope,
        frequency_divisors=tuple(1 / (part + (1 - part) / factor) for part in kept),
        attention_factor=_yarn_sharpness(parameters, factor),
    )


def _yarn_sharpness(parameters: HfConfig, factor: float) -> float:
    """The file's attention_factor, else the paper's rule with DeepSeek's two weights, if given."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def rule(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    weight, weight_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return rule(weight) / rule(weight_all) if weight and weight_all else rule(1.0)


def _longrope(rope: Rope, parameters: HfConfig, hf: HfConfig) -> Rope:
    """Phi's scaling: divisors for short and long contexts, sharper attention (LongRoPE, 2024)."""
    original = _original_length(parameters, hf)
    factor = float(parameters.get("factor") or int(hf["max_position_embeddings"]) / original)
    sharpness = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    given = parameters.get("attention_factor")
    return replace(
        rope,
        frequency_divisors=tuple(map(float, parameters["short_factor"])),
        long_frequency_divisors=tuple(map(float, parameters["long_factor"])),
        original_max_position=original,
        attention_factor=sharpness if given is None else float(given),
    )


def _original_length(parameters: HfConfig, hf: HfConfig) -> int:
    """The context length that the model was trained with, before any extension."""
    name = "original_max_position_embeddings"
    return int(parameters.get(name) or hf.get(name) or hf["max_position_embeddings"])


_KINDS: dict[str, Callable[[Rope, HfConfig, HfConfig], Rope]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,  # applies only past max_position_embeddings, which no request exceeds
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
    "su": _longrope,  # the name of longrope in the first files
}
