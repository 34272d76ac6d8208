"""Model files that claim what they do not hold: refused by file, key and value, at once."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpuworker.models.errors import WeightError
from gpuworker.models.loader import load_decoder
from gpuworker.models.source import open_source
from tests.gpuworker.models.gguf_bytes import Q4_0, U32, GgufBytes, array, llama
from tests.gpuworker.tiny import LLAMA, save_checkpoint


def load(path: Path) -> None:
    load_decoder(open_source(path), torch.device("cpu"), torch.float32, lambda _done, _all: None)


def test_the_file_that_the_others_change_is_good(tmp_path: Path) -> None:
    load(llama().write(tmp_path / "model.gguf"))


HOSTILE_GGUF: dict[str, tuple[Callable[[GgufBytes], Any], str]] = {
    "layers": (lambda f: f.add("llama.block_count", 2**31), "block_count is 2147483648"),
    "no layers": (lambda f: f.add("llama.block_count", 0), "block_count is 0"),
    "no heads": (lambda f: f.add("llama.attention.head_count", 0), "head_count is 0"),
    "heads of each layer": (
        lambda f: f.pairs.update({"llama.attention.head_count": array(U32, [2, 2])}),
        r"head_count is \[2, 2\]",
    ),
    "KV heads that divide nothing": (
        lambda f: f.add("llama.attention.head_count_kv", 3),
        "no multiple of 3 KV heads",
    ),
    "epsilon": (
        lambda f: f.add("llama.attention.layer_norm_rms_epsilon", float("nan")),
        "layer_norm_rms_epsilon is nan",
    ),
    "a word for a number": (
        lambda f: f.add("llama.context_length", "long"),
        "context_length is 'long'",
    ),
    "context": (lambda f: f.add("llama.context_length", 2**32 - 1), "context_length is 42949"),
    "token id": (
        lambda f: f.add("tokenizer.ggml.eos_token_id", 2**32 - 1),
        "eos_token_id is 4294967295",
    ),
    "token id past the vocabulary": (
        lambda f: f.add("tokenizer.ggml.eos_token_id", 16),
        "token 16 is not in the vocabulary of 16",
    ),
    "alignment 0": (lambda f: f.add("general.alignment", 0), "general.alignment is 0"),
    "alignment 3": (lambda f: f.add("general.alignment", 3), "general.alignment is 3"),
    "a word for the alignment": (
        lambda f: f.add("general.alignment", "32"),
        "general.alignment is '32'",
    ),
    "experts of nothing": (
        lambda f: f.tensor("blk.0.ffn_up_exps.weight", (10**9, 0)),
        r"blk.0.ffn_up_exps.weight' is \[1000000000, 0\]",
    ),
    "experts": (
        lambda f: f.tensor("blk.0.ffn_up_exps.weight", (64, 1)),
        r"has shape \[64, 1\]; expert_count is 0",
    ),
    "dimensions": (
        lambda f: f.tensor("x", (1,) * 70),
        "dimensions of tensor 'x' is 70",
    ),
    "a product past any file": (
        lambda f: f.tensor("x", (2**32, 2**32), data=b""),
        "tensor 'x' is truncated",
    ),
    "odd rows of a blocked type": (
        lambda f: f.tensor("x", (7, 33), Q4_0),
        "'x' has rows of 33 values; type Q4_0 has blocks of 32",
    ),
    "type": (lambda f: f.tensor("x", (4,), 999), "'x' has the unknown type 999"),
    "offset": (lambda f: f.tensor("x", (4,), offset=2**40), "'x' is truncated"),
    "crooked offset": (lambda f: f.tensor("x", (4,), offset=5), "offset of tensor 'x' is 5"),
    "pairs": (lambda f: setattr(f, "num_pairs", 2**60), "number of pairs is 11529"),
    "tensors": (lambda f: setattr(f, "num_tensors", 2**60), "number of tensors is 11529"),
    "array": (
        lambda f: f.pairs.update({"x": struct.pack("<IIQ", 9, 4, 2**62)}),
        "length of 'x' is 46116",
    ),
    "array of arrays": (
        lambda f: f.pairs.update({"x": struct.pack("<IIQ", 9, 9, 1)}),
        "type of 'x' is 9",
    ),
    "string": (
        lambda f: f.pairs.update({"x": struct.pack("<IQ", 8, 2**63)}),
        "'x' should have 92233",
    ),
    "queries of another shape": (
        lambda f: f.tensor("blk.0.attn_q.weight", (31, 32)),
        r"q_proj.weight' has shape \[31, 32\]",
    ),
    "layer without a number": (lambda f: f.tensor("blk.", (4,)), "is not part of"),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE_GGUF.values(), ids=HOSTILE_GGUF)
def test_a_gguf_file_is_refused_by_what_is_wrong(
    tmp_path: Path, change: Callable[[GgufBytes], Any], message: str
) -> None:
    file = llama()
    change(file)
    with pytest.raises(WeightError, match=message):
        load(file.write(tmp_path / "model.gguf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, transformers.LlamaConfig(**LLAMA))
    return tmp_path


HOSTILE_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "layers as a float": ({"num_hidden_layers": 1e9}, "num_hidden_layers is 1000000000.0"),
    "layers of infinity": ({"num_hidden_layers": float("inf")}, "num_hidden_layers is inf"),
    "heads": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "heads as a word": ({"num_attention_heads": "x"}, "num_attention_heads is 'x'"),
    "a yes for a number": ({"num_key_value_heads": True}, "num_key_value_heads is True"),
    "vocabulary": ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
    "context": ({"max_position_embeddings": 10**9}, "max_position_embeddings is 1000000000"),
    "odd heads": ({"head_dim": 15}, "15 of 15 dimensions"),
    "epsilon": ({"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    "rope": ({"rope_parameters": {"rope_theta": 0}}, "rope_theta is 0"),
    "rope factor": (
        {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
        "factor is nan",
    ),
    "end token": ({"eos_token_id": [3, 2**32 - 1]}, "eos_token_id is 4294967295"),
    "kept end token": ({"eos_token_id": 160}, "token 160 is not in the vocabulary of 160"),
    "tables": (
        {"max_position_embeddings": 1 << 24},
        "needs rotary tables of 268435456 values",
    ),
}


@pytest.mark.parametrize(("change", "message"), HOSTILE_CONFIGS.values(), ids=HOSTILE_CONFIGS)
def test_a_configuration_is_refused_by_key_and_value(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    file = folder / "config.json"
    (folder / "generation_config.json").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(WeightError, match=message):
        load(folder)


def header(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def tensor_header(**changes: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    return header({"x": entry}) + bytes(8)


ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
HOSTILE_PARTS = {
    "list": ("config.json", b"[]", "is no JSON object"),
    "nothing": ("config.json", b'{"architectures": ["LlamaForCausalLM"]}', "is missing"),
    "deep": ("config.json", b"[" * 100_000, "is not JSON"),
    "long number": ("config.json", b'{"vocab_size": ' + b"9" * 10_000 + b"}", "is not JSON"),
    "number": ("generation_config.json", b"3", "is no JSON object"),
    "index": ("model.safetensors.index.json", b'{"weight_map": 3}', "has no weight_map"),
    "outside": (
        "model.safetensors.index.json",
        b'{"weight_map": {"x": "../../etc/passwd"}}',
        "is no file name",
    ),
    "no tensors": ("model.safetensors", b"\x02" + bytes(7) + b"{}", "has no tensor"),
    "no type": ("model.safetensors", tensor_header(dtype=[1]), "has type"),
    "no shape": ("model.safetensors", tensor_header(shape=2), "has shape 2"),
    "negative shape": ("model.safetensors", tensor_header(shape=[-1, -2]), r"has shape \[-1, -2\]"),
    "empty shape": ("model.safetensors", tensor_header(shape=[0]), r"has shape \[0\]"),
    "many dimensions": ("model.safetensors", tensor_header(shape=[1] * 70), "has shape"),
    "offsets": ("model.safetensors", tensor_header(data_offsets=[0, 8.0]), "has data_offsets"),
    "negative offsets": ("model.safetensors", tensor_header(data_offsets=[-8, 0]), "data_offsets"),
    "past the end": ("model.safetensors", tensor_header(data_offsets=[8, 16]), "is truncated"),
    "other size": ("model.safetensors", tensor_header(data_offsets=[0, 4]), "is truncated"),
    "huge header": ("model.safetensors", struct.pack("<Q", 2**63) + b"{}", "header is cut"),
    "overlap": (
        "model.safetensors",
        header({"x": ENTRY, "y": ENTRY}) + bytes(4),
        "'x' and 'y' in model.safetensors overlap",
    ),
}


@pytest.mark.parametrize(("name", "content", "message"), HOSTILE_PARTS.values(), ids=HOSTILE_PARTS)
def test_a_part_of_a_folder_is_refused_by_what_is_wrong(
    folder: Path, name: str, content: bytes, message: str
) -> None:
    (folder / name).write_bytes(content)
    with pytest.raises(WeightError, match=message):
        load(folder)
