"""Tiny random checkpoints, saved by transformers as it saves real ones, and runners over them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from gpuworker import kv_pool
from gpuworker.core.input_batch import BatchLimits
from gpuworker.engine import DeviceParts, attention_backend, build_runner
from gpuworker.models.loader import load_decoder, with_max_model_len
from gpuworker.models.source import open_source
from gpuworker.runner import ModelRunner

VOCAB_SIZE = 160
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": [3, 5],
}


def save_checkpoint(folder: Path, config: Any, **options: Any) -> Any:
    """A random model of this configuration, saved in `folder`; returns it in float32."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights are all ones and biases zeros at first: no test would notice them.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, **options)
    return model.eval()


def make_runner(
    model: Path,
    *,
    num_kv_blocks: int = 128,
    block_size: int = 16,
    max_num_seqs: int = 40,
    dtype: torch.dtype = torch.float32,
    num_spec_tokens: int = 0,
    attention: str = "auto",
    kv_dtype: torch.dtype | None = None,
    parts: DeviceParts | None = None,
    max_model_len: int | None = None,
) -> ModelRunner:
    """A runner on the CPU, with attention as the worker has it; unused KV slots are poisoned."""
    device = torch.device("cpu")
    source = open_source(model)
    source.config = with_max_model_len(source.config, max_model_len)
    decoder = load_decoder(source, device, dtype, lambda _done, _all: None)
    config = source.config
    kv_dtype = kv_dtype or dtype
    kv = kv_pool.allocate(config, num_kv_blocks, block_size, kv_dtype, device)
    for layer in kv:
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    limits = BatchLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=2048,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        vocab_size=config.vocab_size,
        eos_token_ids=source.eos_token_ids,
    )
    backend = attention_backend(attention, limits, config, (device, dtype), kv_dtype)
    return build_runner(
        decoder, backend, kv, limits, parts or DeviceParts.of(device), num_spec_tokens
    )
