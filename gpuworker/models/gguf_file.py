"""Reads weights from a GGUF file; each tensor is dequantized when the loader reads the tensor."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.models.config import LayerConfig, ModelConfig
from gpuworker.models.embedding import StoredRows
from gpuworker.models.errors import UnsupportedModelError, WeightError
from gpuworker.models.families import model_config
from gpuworker.models.gguf_metadata import GgufMetadata
from headrace.service.gguf_header import GgufError, TensorInfo, read_gguf_header

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
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
# Tensors that stack all experts of a layer -> the name of each expert's tensor.
_STACKED_NAMES = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
_GEMMA_NAMES = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}
# Architectures in which a layer tensor's name has another meaning.
_LAYER_NAMES_BY_ARCHITECTURE = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": _GEMMA_NAMES,
    "gemma3": _GEMMA_NAMES,
}
# Tensors of rope frequency divisors -> the field of Rope.
_ROPE_DIVISORS = {
    "rope_freqs.weight": "frequency_divisors",
    "rope_factors_short.weight": "frequency_divisors",
    "rope_factors_long.weight": "long_frequency_divisors",
}

# Types that `dequantize` takes as numbers rather than as bytes.
_PLAIN_TYPES = {
    gguf.GGMLQuantizationType.F32: np.float32,
    gguf.GGMLQuantizationType.F16: np.float16,
}
# Limit for rope divisors: a rope has one divisor per pair of dimensions of a head.
_MAX_DIVISORS = 1 << 12
# Dequantization makes several copies; with 4 Mi values per piece the copies take about 50 MB.
_PIECE_VALUES = 1 << 22


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's location; shape is in torch's order (rows first), in whole blocks of the type."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the file's start
    num_bytes: int


class GgufSource:
    """A WeightSource over a GGUF file, memory-mapped."""

    def __init__(self, file: Path) -> None:
        if not file.is_file():
            raise WeightError(f"there is no model at {file}")
        try:
            header = read_gguf_header(file, with_strings=False)
        except GgufError as error:
            raise WeightError(str(error)) from None
        self._buffer = header.buffer
        self._metadata = GgufMetadata(file.name, header.metadata)
        names = _LAYER_NAMES | _LAYER_NAMES_BY_ARCHITECTURE.get(self._metadata.architecture, {})
        tensors = {
            name: _tensor(name, info, len(header.buffer)) for name, info in header.tensors.items()
        }
        self._divisors = {
            field: self._frequency_divisors(tensors.pop(name))
            for name, field in _ROPE_DIVISORS.items()
            if name in tensors
        }
        self._tensor_by_name: dict[str, GgufTensor] = {}
        for name, tensor in tensors.items():
            self._tensor_by_name |= _hf_tensors(name, tensor, names, self._metadata.num_experts)
        if "model.embed_tokens.weight" not in self._tensor_by_name:
            raise WeightError(f"{file.name}: tensor 'token_embd.weight' is missing")
        self.config: ModelConfig = self._config()
        self.eos_token_ids = self._metadata.eos_token_ids()
        self.dtype = torch.float32

    def names(self) -> set[str]:
        return set(self._tensor_by_name)

    def read(self, name: str) -> torch.Tensor:
        return self._uninterleave(name, torch.from_numpy(self._values(self._tensor(name))))

    def stored_rows(self, name: str) -> StoredRows | None:
        tensor = self._tensor(name)
        if tensor.kind == gguf.GGMLQuantizationType.F32:
            return None
        return _QuantizedRows(tensor, self._data(tensor).reshape(tensor.shape[0], -1).copy())

    def _tensor(self, name: str) -> GgufTensor:
        tensor = self._tensor_by_name.get(name)
        if tensor is None:
            raise WeightError(f"tensor {name!r} is missing")
        return tensor

    def _data(self, tensor: GgufTensor) -> NDArray[np.uint8]:
        """A tensor's bytes, as a view of the mapped file."""
        return np.frombuffer(self._buffer, np.uint8, tensor.num_bytes, tensor.offset)

    def _values(self, tensor: GgufTensor) -> NDArray[np.float32]:
        """A tensor's values, dequantized piece by piece."""
        data = self._data(tensor)
        block_size, type_size = gguf.GGML_QUANT_SIZES[tensor.kind]
        values = np.empty(math.prod(tensor.shape), dtype=np.float32)
        step = _PIECE_VALUES // block_size
        for start in range(0, len(data) // type_size, step):
            result = _dequantized(data[start * type_size : (start + step) * type_size], tensor)
            values[start * block_size :][: result.size] = result.reshape(-1)
        return values.reshape(tensor.shape)

    def _frequency_divisors(self, tensor: GgufTensor) -> tuple[float, ...]:
        if math.prod(tensor.shape) > _MAX_DIVISORS:
            raise WeightError(f"tensor {tensor.name!r} has shape {list(tensor.shape)}")
        return tuple(self._values(tensor).reshape(-1).tolist())

    def _config(self) -> ModelConfig:
        metadata = self._metadata
        embedding = self._tensor_by_name["model.embed_tokens.weight"]
        hf = metadata.as_hf()
        hf["vocab_size"] = embedding.shape[0]
        hf["tie_word_embeddings"] = "lm_head.weight" not in self._tensor_by_name
        hf["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensor_by_name
        # GGUF stores norm weights with the offset already added.
        config = replace(model_config(hf), norm_offset=0.0)
        if not self._divisors:
            if metadata.model("rope.scaling.type", "none") == "longrope":
                raise WeightError("tensor 'rope_factors_long.weight' is missing")
            return config
        return replace(config, layers=tuple(map(self._with_divisors, config.layers)))

    def _with_divisors(self, layer: LayerConfig) -> LayerConfig:
        if layer.rope is None:
            return layer
        original = int(
            self._metadata.model(
                "rope.scaling.original_context_length", self._metadata.model("context_length")
            )
        )
        sharpness = float(self._metadata.model("rope.scaling.attn_factor", 1.0))
        rope = replace(
            layer.rope,
            original_max_position=original,
            attention_factor=sharpness,
            frequency_divisors=self._divisors.get("frequency_divisors", ()),
            long_frequency_divisors=self._divisors.get("long_frequency_divisors", ()),
        )
        return replace(layer, rope=rope)

    def _uninterleave(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """Reorders query and key rows from interleaved rotation to rotation by halves."""
        if not self._metadata.is_interleaved:
            return weight
        attention = self.config.attention
        if ".q_proj." in name:
            num_heads = attention.num_heads
        elif ".k_proj." in name:
            num_heads = attention.num_kv_heads
        else:
            return weight
        if weight.shape[0] != num_heads * attention.head_dim:
            return weight  # the loader rejects this shape
        rows = weight.view(num_heads, attention.head_dim // 2, 2, -1)
        return rows.transpose(1, 2).reshape(weight.shape)


class _QuantizedRows(StoredRows):
    """Rows of a matrix in the file's type; data is [num_rows, bytes of a row]."""

    def __init__(self, tensor: GgufTensor, data: NDArray[np.uint8]) -> None:
        self._tensor = tensor
        self._data = data

    def read(self, index: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(_dequantized(self._data[index.numpy()], self._tensor))


def _dequantized(data: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
    """Dequantizes whole blocks of a tensor; the last dimension of data is bytes."""
    values: NDArray[np.float32]
    if tensor.kind in _PLAIN_TYPES:
        data = data.view(_PLAIN_TYPES[tensor.kind])
    try:
        values = gguf.quants.dequantize(data, tensor.kind)
    except NotImplementedError:
        raise UnsupportedModelError(
            f"tensor {tensor.name!r} has type {tensor.kind.name}, which cannot be dequantized"
        ) from None
    return values


def _tensor(name: str, info: TensorInfo, file_bytes: int) -> GgufTensor:
    """Checks that a tensor's type is supported and that all its bytes are in the file."""
    try:
        kind = gguf.GGMLQuantizationType(info.kind)
    except ValueError:
        raise WeightError(f"tensor {name!r} has the unknown type {info.kind}") from None
    block_size, type_size = gguf.GGML_QUANT_SIZES[kind]
    if info.shape[-1] % block_size:
        raise WeightError(
            f"tensor {name!r} has rows of {info.shape[-1]} values; type {kind.name} has blocks of "
            f"{block_size}"
        )
    num_bytes = math.prod(info.shape) // block_size * type_size
    if info.offset + num_bytes > file_bytes:
        raise WeightError(
            f"tensor {name!r} is truncated: it should end at byte {info.offset + num_bytes}, "
            f"the file has {file_bytes}"
        )
    return GgufTensor(name, info.shape, kind, info.offset, num_bytes)


def _hf_tensors(
    name: str, tensor: GgufTensor, layer_names: dict[str, str], num_experts: int
) -> dict[str, GgufTensor]:
    """A tensor, or the experts' tensors stacked in the tensor, by Hugging Face name.

    An unknown name is kept; the loader then rejects the tensor as unread.
    """
    if name in _GLOBAL_NAMES:
        return {_GLOBAL_NAMES[name]: tensor}
    if not name.startswith("blk."):
        return {name: tensor}
    layer, _, rest = name.removeprefix("blk.").partition(".")
    stem, _, kind = rest.rpartition(".")
    prefix = f"model.layers.{layer}"
    if stem in _STACKED_NAMES:
        if tensor.shape[0] != num_experts:
            raise WeightError(
                f"tensor {name!r} has shape {list(tensor.shape)}; expert_count is {num_experts}"
            )
        return {
            f"{prefix}.mlp.experts.{i}.{_STACKED_NAMES[stem]}.{kind}": expert
            for i, expert in enumerate(_unstacked(tensor))
        }
    return {f"{prefix}.{layer_names.get(stem, stem)}.{kind}": tensor}


def _unstacked(tensor: GgufTensor) -> list[GgufTensor]:
    """Splits a tensor along its first dimension; the parts are contiguous in the file."""
    count, *shape = tensor.shape
    size = tensor.num_bytes // count
    return [
        replace(tensor, shape=tuple(shape), offset=tensor.offset + i * size, num_bytes=size)
        for i in range(count)
    ]
