"""Gemma 3 270M from its GGUF file of four quantized types, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gpuworker.models.gguf_file import GgufSource
from headrace.service.model_files import ModelFilesError, resolve
from tests.gpuworker.driver import Driver
from tests.gpuworker.tiny import make_runner

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

NUM_OUTPUT = 12
CHUNK = 97
# Plain text with its token ids in this model's vocabulary; the last is longer than its window.
PROMPTS_FILE = Path(__file__).parent / "data" / "prompts_gemma3.json"


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return resolve("gemma3-270m")
    except ModelFilesError as error:
        if "No matching distribution" not in str(error):
            raise
        pytest.skip(f"the package index here has no gemma3-270m: {error}")


@pytest.fixture(scope="module")
def reference(file: Path) -> Any:
    """The same weights in transformers, which adds 1 to the norms' when it uses them."""
    source = GgufSource(file)
    config = transformers.Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        query_pre_attn_scalar=256,
        sliding_window=512,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    weights = {}
    for name in source.names():
        weight = source.read(name)
        weights[name] = weight - 1 if "norm" in name else weight
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    # Computed, not stored: a model made without memory has none yet.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(config.hidden_size**0.5)
    return model.eval()


def test_greedy_output_equals_transformers_token_by_token(file: Path, reference: Any) -> None:
    driver = Driver(make_runner(file, num_kv_blocks=120, max_num_seqs=8, max_model_len=1024))
    prompts = [entry["token_ids"] for entry in json.loads(PROMPTS_FILE.read_text("utf-8"))]
    assert len(prompts[-1]) > 512 + CHUNK
    for row, tokens in enumerate(prompts):
        driver.add(row, tokens)
    while True:
        scheduled = {
            row: min(len(request.tokens) - request.num_computed_tokens, CHUNK)
            for row, request in driver.requests.items()
            if len(request.output) < NUM_OUTPUT
        }
        if not scheduled:
            break
        driver.step(scheduled)
    for request in driver.requests.values():
        first = request.num_prompt_tokens - 1
        with torch.inference_mode():
            tokens = torch.tensor([request.tokens[:-1]])
            logits = reference(tokens, logits_to_keep=len(request.output)).logits[0]
        # The reference, shown our output so far, would go on with the same token at every place.
        assert logits.argmax(-1).tolist() == request.output
        assert len(tokens[0]) - first == len(request.output)
    # "if n == 0:" after the head of a function, in this model's tokens.
    assert driver.requests[2].output[:6] == [584, 538, 1251, 236743, 236771, 236787]
