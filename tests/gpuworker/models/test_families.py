"""Every family on a tiny random checkpoint: the logits of transformers, however a batch is cut."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from gpuworker.core.plan import SamplingSettings
from gpuworker.models.config import Rope
from gpuworker.models.errors import UnsupportedModelError
from gpuworker.models.families import model_config
from gpuworker.models.loader import _Loader
from gpuworker.models.rope import rope_tables
from tests.gpuworker.driver import Driver
from tests.gpuworker.tiny import LLAMA, VOCAB_SIZE, make_runner, save_checkpoint

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_HEAD_DIM = {name: value for name, value in LLAMA.items() if name != "head_dim"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 512,
    "partial_rotary_factor": 0.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
GEMMA = LLAMA | {"query_pre_attn_scalar": 20, "sliding_window": 24}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**LLAMA),
    "llama with biases, tied": transformers.LlamaConfig(
        **LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama3 rope": transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA3_ROPE),
    "llama linear rope": transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama dynamic rope": transformers.LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "mistral": transformers.MistralConfig(**LLAMA, sliding_window=None),
    "mistral with a window": transformers.MistralConfig(**LLAMA, sliding_window=24),
    "qwen2": transformers.Qwen2Config(**NO_HEAD_DIM),
    "qwen2 with windows": transformers.Qwen2Config(**NO_HEAD_DIM, **WINDOWS),
    "qwen3": transformers.Qwen3Config(**LLAMA),
    "qwen2 yarn": transformers.Qwen2Config(**NO_HEAD_DIM, rope_parameters=YARN),
    "qwen3 yarn, not cut, by weights": transformers.Qwen3Config(
        **LLAMA,
        rope_parameters=YARN
        | {
            "truncate": False,
            "mscale": 0.8,
            "mscale_all_dim": 0.5,
            "beta_fast": 16,
            "beta_slow": 2,
        },
    ),
    "qwen3 yarn, attention factor": transformers.Qwen3Config(
        **LLAMA, rope_parameters=YARN | {"attention_factor": 1.3}
    ),
    "smollm3": transformers.SmolLM3Config(
        **NO_HEAD_DIM, no_rope_layers=[1, 0, 1], pad_token_id=0, bos_token_id=1
    ),
    "phi3": transformers.Phi3Config(**NO_HEAD_DIM, pad_token_id=0),
    "phi3 partial longrope": transformers.Phi3Config(
        **NO_HEAD_DIM, pad_token_id=0, rope_parameters=LONG_ROPE
    ),
    "gemma2": transformers.Gemma2Config(
        **GEMMA, layer_types=KINDS, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
    ),
    "mixtral": transformers.MixtralConfig(**LLAMA, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": transformers.Qwen3MoeConfig(**LLAMA, **EXPERTS, norm_topk_prob=True),
    "qwen3_moe, a dense layer": transformers.Qwen3MoeConfig(
        **LLAMA, **EXPERTS, mlp_only_layers=[1]
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **GEMMA, layer_types=KINDS, rope_parameters=GEMMA3_ROPES
    ),
}
# The logits of a step are seen through log probabilities of the whole vocabulary.
EVERY_TOKEN = SamplingSettings(temperature=0.0, num_logprobs=VOCAB_SIZE)


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, save_checkpoint(folder, request.param)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, VOCAB_SIZE, length).tolist()


def expected_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab_size], by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)


def logprobs_by_row(result: Any) -> dict[int, torch.Tensor]:
    """[num_sampled, vocab_size] of each row, back in the order of token ids."""
    by_row = {}
    for row in result.logprobs:
        ids = torch.from_numpy(row.tokens.top_token_ids.astype(np.int64))
        values = torch.from_numpy(row.tokens.top_logprobs)
        by_row[row.row] = torch.empty_like(values).scatter_(1, ids, values)
    return by_row


def assert_matches(driver: Driver, result: Any, model: Any) -> None:
    """Every sampled place of the result has the reference's distribution."""
    for row, logprobs in logprobs_by_row(result).items():
        request = driver.requests[row]
        expected = expected_logprobs(model, request.tokens[:-1])[-len(logprobs) :]
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=2e-5)


def test_prefill_chunks_decodes_and_mixed_batches_match(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    driver = Driver(make_runner(folder))
    driver.add(4, prompt(70, seed=1), EVERY_TOKEN)
    assert_matches(driver, driver.step({4: 70}), model)
    driver.add(0, prompt(90, seed=2), EVERY_TOKEN)
    driver.add(7, prompt(1, seed=3), EVERY_TOKEN)
    for chunk in (33, 40, 17):
        result = driver.step({4: 1, 0: chunk, 7: 1})
        assert_matches(driver, result, model)
    assert len(driver.requests[0].output) == 1
    assert_matches(driver, driver.step({0: 1, 4: 1}), model)


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(
    checkpoint: tuple[Path, Any],
) -> None:
    folder, model = checkpoint
    driver = Driver(make_runner(folder))
    driver.add(2, prompt(37, seed=4), EVERY_TOKEN)
    driver.add(3, prompt(20, seed=5), EVERY_TOKEN)
    driver.step({2: 37, 3: 20})
    driver.step({2: 1, 3: 1})
    old = driver.free(2)
    driver.step({3: 1})
    again = driver.add(6, old.tokens[:37], EVERY_TOKEN, output=old.output)
    driver.step({6: 30, 3: 1})
    result = driver.step({6: 9, 3: 1})
    assert again.tokens[: len(old.tokens)] == old.tokens
    assert_matches(driver, result, model)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_in_the_form_for_gpus_match_too(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Loader, "_listed_experts", _Loader._grouped_experts)
    model = save_checkpoint(tmp_path, CONFIGS[family])
    driver = Driver(make_runner(tmp_path))
    driver.add(0, prompt(50, seed=1), EVERY_TOKEN)
    assert_matches(driver, driver.step({0: 50}), model)
    assert_matches(driver, driver.step({0: 1}), model)


@pytest.mark.parametrize(("max_model_len", "length"), [(64, 60), (None, 100)])
def test_longrope_is_that_of_transformers_within_and_past_the_original_context(
    tmp_path: Path, max_model_len: int | None, length: int
) -> None:
    """Which divisors hold follows from max_model_len; transformers goes by each sequence."""
    rope = LONG_ROPE | {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 8.0, 30.0],
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 1.0,
    }
    sizes = NO_HEAD_DIM | {"pad_token_id": 0}
    model = save_checkpoint(tmp_path, transformers.Phi3Config(**sizes, rope_parameters=rope))
    driver = Driver(make_runner(tmp_path, max_model_len=max_model_len))
    driver.add(0, prompt(length, seed=1), EVERY_TOKEN)
    assert_matches(driver, driver.step({0: length}), model)
    assert_matches(driver, driver.step({0: 1}), model)


def test_an_unknown_architecture_lists_what_is_supported() -> None:
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM"):
        model_config({"architectures": ["BloomForCausalLM"]})


def test_an_unknown_rope_type_is_refused() -> None:
    config = transformers.LlamaConfig(**LLAMA).to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    config["rope_parameters"] = {"rope_type": "spiral", "rope_theta": 1e4, "factor": 2.0}
    supported = "default, linear, dynamic, yarn, llama3, longrope"
    with pytest.raises(UnsupportedModelError, match=f"'spiral' is not supported.*: {supported}"):
        model_config(config)


def test_a_context_that_yarn_stretches_is_as_long_as_it_says() -> None:
    config = {**transformers.Qwen2Config(**NO_HEAD_DIM).to_dict(), "rope_parameters": None}
    config["architectures"] = ["Qwen2ForCausalLM"]
    assert model_config(config).max_model_len == 512
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0}
    assert model_config(config).max_model_len == 2048
    config["rope_scaling"]["original_max_position_embeddings"] = 64
    assert model_config(config).max_model_len == 512


def test_an_unknown_activation_is_refused() -> None:
    config = transformers.LlamaConfig(**LLAMA, hidden_act="relu").to_dict()
    config["architectures"] = ["LlamaForCausalLM"]
    with pytest.raises(UnsupportedModelError, match="relu"):
        model_config(config)


def test_older_files_say_the_same_in_other_words() -> None:
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_hidden_layers": 7,
        "max_position_embeddings": 512,
        "vocab_size": 160,
    }
    gemma2 = model_config({"architectures": ["Gemma2ForCausalLM"], **sizes, "sliding_window": 24})
    assert [layer.sliding_window for layer in gemma2.layers] == [24, None, 24, None, 24, None, 24]
    assert gemma2.tie_embeddings
    assert gemma2.attention.head_dim == 256

    gemma3 = model_config(
        {
            "architectures": ["Gemma3ForCausalLM"],
            **sizes,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "rope_theta": 5e5,
            "rope_local_base_freq": 7e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "hidden_activation": "gelu_pytorch_tanh",
        }
    )
    windows = [layer.sliding_window for layer in gemma3.layers]
    assert windows == [24, 24, None, 24, 24, None, 24]
    ropes = [layer.rope for layer in gemma3.layers]
    assert ropes[0] == Rope(base=7e3, rotary_dim=256)
    assert ropes[2] == Rope(base=5e5, rotary_dim=256, linear_factor=8.0)

    llama = model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            **sizes,
            "rope_theta": 3e4,
            "rope_scaling": {**LLAMA3_ROPE, "type": "llama3"},
            "sliding_window": 99,
        }
    )
    assert llama.layers[0].rope is not None
    assert llama.layers[0].rope.scaling is not None
    assert llama.layers[0].sliding_window is None

    qwen2 = {"architectures": ["Qwen2ForCausalLM"], **sizes, "sliding_window": 24}
    assert {layer.sliding_window for layer in model_config(qwen2).layers} == {None}
    qwen2 |= {"use_sliding_window": True, "max_window_layers": 5}
    assert [layer.sliding_window for layer in model_config(qwen2).layers][4:] == [None, 24, 24]


def test_long_divisors_are_for_contexts_past_the_original() -> None:
    rope = Rope(
        base=100.0,
        rotary_dim=4,
        frequency_divisors=(1.0, 1.0),
        long_frequency_divisors=(2.0, 4.0),
        original_max_position=64,
        attention_factor=1.5,
    )
    for length, divisors in ((64, (1.0, 1.0)), (65, (2.0, 4.0))):
        tables = rope_tables(rope, length, torch.device("cpu"))
        for i, (frequency, divisor) in enumerate(zip((1.0, 0.1), divisors, strict=True)):
            angle = 3 * frequency / divisor
            expected = [1.5 * np.cos(angle), 1.5 * np.sin(angle)]
            row = [tables.cosines[3, i], tables.sines[3, i]]
            np.testing.assert_allclose(row, expected, rtol=1e-5)
