"""Translates a GGUF file's key-value pairs to the keys of a Hugging Face config.json.

GGUF omits facts that are fixed for an architecture; this module adds them.
"""

import math
from collections.abc import Callable
from typing import Any

from gpuworker.models.checks import GGUF_BOUNDS, check_values
from gpuworker.models.errors import UnsupportedModelError, WeightError
from gpuworker.models.rope_config import unknown_rope_type

# Models whose attention scale does not follow from head_dim, by architecture and number of layers.
_SCALED_BY_WIDTH = {("gemma2", 46), ("gemma3", 62)}
_SMOLLM3_NO_ROPE_INTERVAL = 4


class GgufMetadata:
    """Typed access to a file's key-value pairs.

    Args:
        file: the file's name, for messages.
        values: by key.

    Raises:
        UnsupportedModelError: the architecture is not supported.
        WeightError: a value has a wrong type or is out of range.
    """

    def __init__(self, file: str, values: dict[str, Any]) -> None:
        self._file = file
        self._values = values
        self.architecture = str(self.value("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"GGUF architecture {self.architecture!r} is not supported; supported are: "
                + ", ".join(sorted(_ARCHITECTURES))
            )
        check_values(file, values, GGUF_BOUNDS, f"{self.architecture}.")

    @property
    def is_interleaved(self) -> bool:
        """Whether query and key rows are in the order of interleaved rotation."""
        return self.architecture in _INTERLEAVED

    @property
    def num_experts(self) -> int:
        """Number of experts per layer; 0 for a model without experts."""
        return int(self.model("expert_count", 0))

    def as_hf(self) -> dict[str, Any]:
        """The keys of a config.json, except those that only the tensors determine."""
        num_heads = int(self.model("attention.head_count"))
        hidden_size = int(self.model("embedding_length"))
        head_dim = int(self.model("attention.key_length", hidden_size // num_heads))
        name, extra = _ARCHITECTURES[self.architecture]
        if self.architecture == "llama" and self.num_experts:
            name = "MixtralForCausalLM"
        return {
            "architectures": [name],
            "hidden_size": hidden_size,
            "intermediate_size": int(self.model("feed_forward_length")),
            "num_hidden_layers": int(self.model("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self.model("attention.head_count_kv", num_heads)),
            "head_dim": head_dim,
            "rms_norm_eps": float(self.model("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(self.model("context_length")),
            "original_max_position_embeddings": int(
                self.model("rope.scaling.original_context_length", 0)
            ),
            "rope_theta": float(self.model("rope.freq_base", 10000.0)),
            "partial_rotary_factor": self.model("rope.dimension_count", head_dim) / head_dim,
            "rope_scaling": self._rope_scaling(),
            "num_local_experts": self.num_experts,
            "num_experts_per_tok": int(self.model("expert_used_count", 0)),
        } | extra(self)

    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-sequence and end-of-turn tokens, in this order, without duplicates."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return tuple(dict.fromkeys(int(self._values[key]) for key in keys if key in self._values))

    def model(self, key: str, default: Any = None) -> Any:
        """A value whose key begins with the architecture's name."""
        return self.value(f"{self.architecture}.{key}", default)

    def value(self, key: str, default: Any = None) -> Any:
        """The value of a key; WeightError if the key is missing and has no default."""
        value = self._values.get(key, default)
        if value is None:
            raise WeightError(f"{self._file}: GGUF key {key!r} is missing")
        return value

    def _rope_scaling(self) -> dict[str, Any] | None:
        """A config.json's `rope_scaling`; the divisors of longrope and llama3 are tensors."""
        kind = self.model("rope.scaling.type", "linear")
        factor = float(self.model("rope.scaling.factor", self.model("rope.scale_linear", 1.0)))
        match kind:
            case "none" | "longrope":
                return None
            case "linear":
                return {"rope_type": "linear", "factor": factor} if factor > 1 else None
            case "yarn":
                return {"rope_type": "yarn", "factor": factor} | self._yarn(factor)
        raise unknown_rope_type(str(kind))

    def _yarn(self, factor: float) -> dict[str, Any]:
        # The YaRN paper's rule is multiplied by the file's attn_factor.
        sharpness = float(self.model("rope.scaling.attn_factor", 1.0))
        return {
            "attention_factor": sharpness * (1 + 0.1 * math.log(max(factor, 1.0))),
            "beta_fast": float(self.model("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": float(self.model("rope.scaling.yarn_beta_slow", 1.0)),
        }


def _qwen3_moe(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        "moe_intermediate_size": int(metadata.model("expert_feed_forward_length")),
        "norm_topk_prob": True,
    }


def _smollm3(metadata: GgufMetadata) -> dict[str, Any]:
    depth = int(metadata.model("block_count"))
    return {"no_rope_layers": [(i + 1) % _SMOLLM3_NO_ROPE_INTERVAL != 0 for i in range(depth)]}


def _gemma(metadata: GgufMetadata) -> dict[str, Any]:
    num_heads = int(metadata.model("attention.head_count"))
    width = int(metadata.model("embedding_length"))
    key = (metadata.architecture, int(metadata.model("block_count")))
    head_dim = int(metadata.model("attention.key_length", width // num_heads))
    return {
        "query_pre_attn_scalar": width // num_heads if key in _SCALED_BY_WIDTH else head_dim,
        "sliding_window": int(metadata.model("attention.sliding_window", 4096)),
        "hidden_act": "gelu_pytorch_tanh",
    }


def _gemma2(metadata: GgufMetadata) -> dict[str, Any]:
    return _gemma(metadata) | {
        "attn_logit_softcapping": float(metadata.model("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(metadata.model("final_logit_softcapping", 30.0)),
    }


# GGUF architecture -> Hugging Face architecture, and a builder of its additional keys.
_ARCHITECTURES: dict[str, tuple[str, Callable[[GgufMetadata], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", lambda _: {}),
    "qwen2": ("Qwen2ForCausalLM", lambda _: {}),
    "qwen3": ("Qwen3ForCausalLM", lambda _: {}),
    "qwen3moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "smollm3": ("SmolLM3ForCausalLM", _smollm3),
    "phi3": ("Phi3ForCausalLM", lambda _: {}),
    "gemma2": ("Gemma2ForCausalLM", _gemma2),
    "gemma3": ("Gemma3ForCausalLM", _gemma),
}
_INTERLEAVED = {"llama", "smollm3"}
