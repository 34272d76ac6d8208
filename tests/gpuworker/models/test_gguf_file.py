"""GGUF files written here by the gguf package, read back by us."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from gpuworker.models.errors import UnsupportedModelError, WeightError
from gpuworker.models.gguf_file import GgufSource
from gpuworker.models.safetensors_folder import SafetensorsSource
from tests.gpuworker.driver import Driver
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint

# Every row is a whole number of 32-value blocks.
SIZES = LLAMA | {"hidden_size": 96, "intermediate_size": 128, "vocab_size": 128}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(path, transformers.LlamaConfig(**SIZES))
    return path


def gguf_name(name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[stem]}.{kind}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders them: rotation pairs next to each other."""
    shape = weight.shape
    return (
        weight.reshape(num_heads, 2, shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(shape)
    )


def write_gguf(
    file: Path,
    folder: Path,
    kind: gguf.GGMLQuantizationType,
    *,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
) -> None:
    source = SafetensorsSource(folder)
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"token{i}" for i in range(SIZES["vocab_size"])])
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    tensors = {gguf_name(name): source.read(name).numpy() for name in source.names()}
    for name, values in (tensors | (extra or {})).items():
        for part, heads in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
            if part in name:
                values = interleaved(values, SIZES[heads])  # noqa: PLW2901
        if values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


KINDS = {
    "F32": 0.0,
    "F16": 1e-3,
    "BF16": 1e-2,
    "Q8_0": 1e-2,
    "Q5_1": 0.05,
    "Q5_0": 0.08,
    "Q4_1": 0.1,
    "Q4_0": 0.15,
}


@pytest.mark.parametrize(("kind", "tolerance"), KINDS.items())
def test_reads_back_what_was_written(
    folder: Path, tmp_path: Path, kind: str, tolerance: float
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, gguf.GGMLQuantizationType[kind])
    source, original = GgufSource(file), SafetensorsSource(folder)
    assert source.names() == original.names()
    assert source.eos_token_ids == (3, 5)
    for name in source.names():
        expected = original.read(name)
        difference = (source.read(name) - expected).abs().max()
        assert difference <= tolerance * expected.abs().max()


def test_gives_the_tokens_of_the_folder_it_was_made_from(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, gguf.GGMLQuantizationType.F32)
    outputs = []
    for path in (file, folder):
        driver = Driver(make_runner(path))
        driver.add(0, [7, 8, 9, 100, 20])
        outputs.append(driver.finish(0, 12))
    assert outputs[0] == outputs[1]


def test_long_tensors_are_dequantized_in_pieces(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, gguf.GGMLQuantizationType.Q8_0)
    name = "model.embed_tokens.weight"
    whole = GgufSource(file).read(name)
    monkeypatch.setattr("gpuworker.models.gguf_file._PIECE_VALUES", 320)
    assert torch.equal(GgufSource(file).read(name), whole)


def test_rope_divisors_reach_the_configuration(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    kind = gguf.GGMLQuantizationType.F16
    write_gguf(file, folder, kind, extra={"rope_freqs.weight": divisors})
    rope = GgufSource(file).config.layers[0].rope
    assert rope is not None
    assert rope.frequency_divisors == tuple(divisors.tolist())


def test_a_truncated_file_names_the_tensor_it_cuts(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, gguf.GGMLQuantizationType.Q8_0)
    content = file.read_bytes()
    for cut in (len(content) - 1, len(content) // 2):
        file.write_bytes(content[:cut])
        with pytest.raises(WeightError, match=r"tensor '.*' is truncated"):
            GgufSource(file)


@pytest.mark.parametrize("size", [0, 10, 40, 300, 2000])
def test_a_file_cut_in_its_header_is_refused(folder: Path, tmp_path: Path, size: int) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, gguf.GGMLQuantizationType.Q8_0)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(WeightError, match=r"truncated within its header|not a GGUF file"):
        GgufSource(file)


def test_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK" * 100)
    with pytest.raises(WeightError, match="not a GGUF file"):
        GgufSource(file)
    with pytest.raises(WeightError, match="no model at"):
        GgufSource(tmp_path / "nothing.gguf")


def test_an_unknown_architecture_lists_what_is_supported(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, gguf.GGMLQuantizationType.F16, architecture="mamba")
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*llama"):
        GgufSource(file)
