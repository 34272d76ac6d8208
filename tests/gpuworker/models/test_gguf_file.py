"""GGUF files written here by the gguf package, read back by us."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from gpuworker.core.plan import SamplingSettings
from gpuworker.models.errors import UnsupportedModelError, WeightError
from gpuworker.models.gguf_file import GgufSource
from gpuworker.models.safetensors_folder import SafetensorsSource
from tests.gpuworker.driver import Driver
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint

# Every row is a whole number of 32-value blocks.
SIZES = LLAMA | {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
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


def gguf_name(name: str, architecture: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    names = GEMMA_NAMES if architecture.startswith("gemma") else NAMES
    _, _, layer, rest = name.split(".", 3)
    stem, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{names[stem]}.{kind}"


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows as llama.cpp's converter orders them: rotation pairs next to each other."""
    shape = weight.shape
    return (
        weight.reshape(num_heads, 2, shape[0] // num_heads // 2, -1).swapaxes(1, 2).reshape(shape)
    )


def as_stored(name: str, values: np.ndarray, architecture: str) -> np.ndarray:
    """A tensor as a converter writes it."""
    if architecture in {"llama", "smollm3"}:
        for part, heads in (("attn_q.", "num_attention_heads"), ("attn_k.", "num_key_value_heads")):
            if part in name:
                return interleaved(values, SIZES[heads])
    if architecture.startswith("gemma") and "norm" in name:
        return values + np.float32(1)
    return values


def gguf_tensors(source: SafetensorsSource, architecture: str) -> dict[str, np.ndarray]:
    """Tensors under GGUF's names; a layer's experts in one tensor for each of their parts."""
    tensors: dict[str, np.ndarray] = {}
    stacks: dict[str, dict[int, np.ndarray]] = {}
    parts = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}
    for name in source.names():
        values = source.read(name).numpy()
        layer = ".".join(name.split(".")[2:3])
        if ".experts." in name:
            number, part = name.split(".experts.")[1].split(".")[:2]
            stack = f"blk.{layer}.ffn_{parts.get(part, 'down')}_exps.weight"
            stacks.setdefault(stack, {})[int(number)] = values
        elif name.endswith(("mlp.gate.weight", "moe.gate.weight")):
            tensors[f"blk.{layer}.ffn_gate_inp.weight"] = values
        else:
            tensors[gguf_name(name, architecture)] = values
    for name, experts in stacks.items():
        tensors[name] = np.stack([experts[i] for i in range(len(experts))])
    return tensors


def write_gguf(
    file: Path,
    folder: Path,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    rope: dict[str, Any] | None = None,
) -> None:
    """rope: values under `rope.scaling`."""
    source = SafetensorsSource(folder)
    is_mixture = any(".experts." in name for name in source.names())
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
    for key, value in (rope or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"{architecture}.rope.scaling.{key}", value)
    writer.add_sliding_window(24)
    if architecture == "qwen3moe" or is_mixture:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(32)
    writer.add_attn_logit_softcapping(5.0)
    writer.add_final_logit_softcapping(3.0)
    writer.add_token_list([f"token{i}" for i in range(SIZES["vocab_size"])])
    writer.add_eos_token_id(3)
    writer.add_eot_token_id(5)
    tensors = gguf_tensors(source, architecture)
    for name, original in (tensors | (extra or {})).items():
        values = as_stored(name, original, architecture)
        if values.ndim == 1 or "gate_inp" in name:
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


PHI_SIZES = {**SIZES, "pad_token_id": 0}
GEMMA_SIZES = {**SIZES, "query_pre_attn_scalar": 16, "sliding_window": 24}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen2": transformers.Qwen2Config(**SIZES),
    "qwen3": transformers.Qwen3Config(**SIZES, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(
        **SIZES,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "qwen3moe": transformers.Qwen3MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    ),
    "smollm3": transformers.SmolLM3Config(
        **SIZES,
        no_rope_layer_interval=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        pad_token_id=0,
        bos_token_id=1,
    ),
    "phi3": transformers.Phi3Config(**PHI_SIZES),
    "gemma2": transformers.Gemma2Config(
        **GEMMA_SIZES, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **GEMMA_SIZES,
        rope_parameters={
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    ),
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_gives_the_tokens_of_the_folder_it_was_made_from(architecture: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "folder", FAMILIES[architecture])
    stored_as = {"mixtral": "llama"}.get(architecture, architecture)
    write_gguf(tmp_path / "model.gguf", tmp_path / "folder", architecture=stored_as)
    prompt = np.random.default_rng(1).integers(6, 128, 40).tolist()
    logprobs = []
    for path in (tmp_path / "model.gguf", tmp_path / "folder"):
        driver = Driver(make_runner(path))
        driver.add(0, prompt, SamplingSettings(temperature=0.0, num_logprobs=128))
        columns = driver.step({0: 40}).logprobs[0].tokens
        assert columns is not None
        logprobs.append(columns.top_logprobs)
    np.testing.assert_allclose(logprobs[0], logprobs[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("stored", "meant"),
    [
        ({"type": "none", "factor": 4.0}, {"rope_type": "default"}),
        ({"factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 8.0, "original_context_length": 64},
            {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
        ),
        (
            {
                "type": "yarn",
                "factor": 4.0,
                "original_context_length": 128,
                "attn_factor": 0.5,
                "yarn_beta_fast": 16.0,
                "yarn_beta_slow": 2.0,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "attention_factor": 0.5 * (1 + 0.1 * math.log(4)),
                "beta_fast": 16,
                "beta_slow": 2,
            },
        ),
    ],
    ids=str,
)
def test_rope_scalings_are_those_of_the_folder(
    tmp_path: Path, stored: dict[str, Any], meant: dict[str, Any]
) -> None:
    rope_parameters = {"rope_theta": 10000.0, **meant}
    config = transformers.Qwen2Config(**SIZES, rope_parameters=rope_parameters)
    save_checkpoint(tmp_path / "folder", config)
    file = tmp_path / "model.gguf"
    write_gguf(file, tmp_path / "folder", architecture="qwen2", rope=stored)
    ours, wanted = GgufSource(file).config, SafetensorsSource(tmp_path / "folder").config
    assert ours.layers == wanted.layers
    assert ours.max_model_len == wanted.max_model_len


def test_a_rope_scaling_that_is_not_known_lists_what_is(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, rope={"type": "spiral"})
    with pytest.raises(UnsupportedModelError, match=r"'spiral' is not supported.*yarn"):
        GgufSource(file)


def test_longrope_without_its_divisors_is_refused(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, folder, rope={"type": "longrope"})
    with pytest.raises(WeightError, match=r"'rope_factors_long\.weight' is missing"):
        GgufSource(file)


def test_phi3_takes_its_long_and_short_divisors_from_tensors(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "folder", transformers.Phi3Config(**PHI_SIZES))
    short, long = np.full(8, 2, dtype=np.float32), np.full(8, 5, dtype=np.float32)
    extra = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    file = tmp_path / "model.gguf"
    write_gguf(file, tmp_path / "folder", architecture="phi3", extra=extra)
    rope = GgufSource(file).config.layers[0].rope
    assert rope is not None
    assert rope.frequency_divisors == (2.0,) * 8
    assert rope.long_frequency_divisors == (5.0,) * 8
    assert rope.original_max_position == 512


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
