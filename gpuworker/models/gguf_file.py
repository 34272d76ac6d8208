"""Weights of a GGUF file, dequantized tensor by tensor as they are asked for."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.models.config import LayerConfig, ModelConfig
from gpuworker.models.errors import UnsupportedModelError, WeightError
from gpuworker.models.families import model_config
from gpuworker.models.gguf_header import GgufTensor, read_header

# GGUF architecture -> Hugging Face architecture.
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
}
# Files of these hold query and key rows in the order of interleaved rotation.
_INTERLEAVED = {"llama"}

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"

# Types that `dequantize` wants as numbers rather than bytes.
_PLAIN_TYPES = {
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
}
# Dequantizing makes several copies: 4 Mi values keep them at some 50 MB.
_PIECE_VALUES = 1 << 22


class GgufSource:
    """A WeightSource over a GGUF file, memory-mapped."""

    def __init__(self, file: Path) -> None:
        header = read_header(file)
        self._buffer = header.buffer
        self._metadata = _Metadata(header.metadata)
        self._tensor_by_name = {_hf_name(name): tensor for name, tensor in header.tensors.items()}
        divisors = self._tensor_by_name.pop(_ROPE_DIVISORS, None)
        self._divisors = () if divisors is None else tuple(self._values(divisors).tolist())
        if "model.embed_tokens.weight" not in self._tensor_by_name:
            raise WeightError(f"{file.name}: tensor 'token_embd.weight' is missing")
        self.config: ModelConfig = self._config()
        self.eos_token_ids = self._metadata.eos_token_ids()
        self.dtype = torch.float32

    def names(self) -> set[str]:
        return set(self._tensor_by_name)

    def read(self, name: str) -> torch.Tensor:
        tensor = self._tensor_by_name.get(name)
        if tensor is None:
            raise WeightError(f"tensor {name!r} is missing")
        return self._uninterleave(name, torch.from_numpy(self._values(tensor)))

    def _values(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """A tensor's values, dequantized piece by piece."""
        data = np.frombuffer(self._buffer, np.uint8, tensor.num_bytes, tensor.offset)
        block_size, type_size = gguf.GGML_QUANT_SIZES[tensor.kind]
        values = np.empty(math.prod(tensor.shape), dtype=np.float32)
        step = _PIECE_VALUES // block_size
        for start in range(0, len(data) // type_size, step):
            piece = data[start * type_size : (start + step) * type_size]
            if tensor.kind in _PLAIN_TYPES:
                piece = piece.view(_PLAIN_TYPES[tensor.kind])
            try:
                result = gguf.quants.dequantize(piece, tensor.kind)
            except NotImplementedError:
                raise UnsupportedModelError(
                    f"tensor {tensor.name!r} has type {tensor.kind.name}, which cannot be "
                    "dequantized"
                ) from None
            values[start * block_size :][: result.size] = result.reshape(-1)
        return values.reshape(tensor.shape)

    def _config(self) -> ModelConfig:
        metadata = self._metadata
        embedding = self._tensor_by_name["model.embed_tokens.weight"]
        hf = metadata.as_hf()
        hf["vocab_size"] = embedding.shape[0]
        hf["tie_word_embeddings"] = "lm_head.weight" not in self._tensor_by_name
        hf["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensor_by_name
        config = model_config(hf)
        if not self._divisors:
            return config
        return replace(config, layers=tuple(map(self._with_divisors, config.layers)))

    def _with_divisors(self, layer: LayerConfig) -> LayerConfig:
        if layer.rope is None:
            return layer
        return replace(layer, rope=replace(layer.rope, frequency_divisors=self._divisors))

    def _uninterleave(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Puts rows of queries and keys back in the order of rotation by halves."""
        if self._metadata.architecture not in _INTERLEAVED:
            return weight
        attention = self.config.attention
        if ".q_proj." in name:
            num_heads = attention.num_heads
        elif ".k_proj." in name:
            num_heads = attention.num_kv_heads
        else:
            return weight
        rows = weight.view(num_heads, attention.head_dim // 2, 2, -1)
        return rows.transpose(1, 2).reshape(weight.shape)


class _Metadata:
    """Typed access to a GGUF file's key-value pairs."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self.architecture = str(self._value("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"GGUF architecture {self.architecture!r} is not supported; supported are: "
                + ", ".join(sorted(_ARCHITECTURES))
            )

    def as_hf(self) -> dict[str, Any]:
        """The same facts under the keys of a config.json; without the vocabulary's size."""
        num_heads = int(self._model("attention.head_count"))
        hidden_size = int(self._model("embedding_length"))
        head_dim = int(self._model("attention.key_length", hidden_size // num_heads))
        rope: dict[str, Any] = {
            "rope_theta": float(self._model("rope.freq_base", 10000.0)),
            "partial_rotary_factor": self._model("rope.dimension_count", head_dim) / head_dim,
        }
        if self._model("rope.scaling.type", "none") == "linear":
            rope |= {"rope_type": "linear", "factor": float(self._model("rope.scaling.factor"))}
        return {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "hidden_size": hidden_size,
            "intermediate_size": int(self._model("feed_forward_length")),
            "num_hidden_layers": int(self._model("block_count")),
            "num_attention_heads": num_heads,
            "num_key_value_heads": int(self._model("attention.head_count_kv", num_heads)),
            "head_dim": head_dim,
            "rms_norm_eps": float(self._model("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": int(self._model("context_length")),
            "rope_parameters": rope,
        }

    def eos_token_ids(self) -> tuple[int, ...]:
        """Ends of sequence and of turn, in this order, each once."""
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return tuple(dict.fromkeys(int(self._value(key)) for key in keys if key in self._values))

    def _model(self, key: str, default: Any = None) -> Any:
        return self._value(f"{self.architecture}.{key}", default)

    def _value(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        if value is None:
            raise WeightError(f"GGUF key {key!r} is missing")
        return value


def _hf_name(name: str) -> str:
    """A tensor's Hugging Face name; an unknown one is kept, for the loader to refuse."""
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name]
    if not name.startswith("blk."):
        return name
    _, layer, rest = name.split(".", 2)
    stem, _, kind = rest.rpartition(".")
    return f"model.layers.{layer}.{_LAYER_NAMES.get(stem, stem)}.{kind}"
