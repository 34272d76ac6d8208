"""Whole forwards of every family: with the kernels, and with torch and attention's formula.

Both sides run the same decoder on the same weights, over a pool of its own each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.random_model import RandomSource
from gpuworker import kv_pool
from gpuworker.attention.interface import AttentionBackend, LayerKv, StepShape
from gpuworker.attention.reference import ReferenceAttention
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.attention.triton.configs import Target
from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.ops import Ops
from gpuworker.kernels.twins import TorchOps
from gpuworker.models.decoder import Decoder
from gpuworker.models.loader import load_decoder
from tests.kernels.batches import CPU, POISON_BLOCK

PAGE = 16
NUM_BLOCKS = 12
SIZES = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, **KINDS}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 64,
    "partial_rotary_factor": 0.5,
}
FAMILIES = {
    "llama with biases": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 7},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]},
    "phi3": {"architectures": ["Phi3ForCausalLM"], "rope_parameters": LONG_ROPE},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        **GEMMA,
    },
    "gemma3": {"architectures": ["Gemma3ForCausalLM"], **GEMMA},
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 16, **EXPERTS},
}
# New tokens of each of two requests, step by step: prefill, chunks beside decodes, drafts.
STEPS = ((19, 0), (1, 12), (1, 4), (3, 1), (1, 1))


@dataclass
class Requests:
    """Two requests that grow: blocks in scattered order, impossible ones where none is."""

    num_computed: list[int] = field(default_factory=lambda: [0, 0])

    def advance(self, counts: tuple[int, int], num_padding: int) -> tuple[StepShape, torch.Tensor]:
        """The next step's shape and its tokens' positions."""
        table = np.full((2, 4), POISON_BLOCK, dtype=np.int32)
        slots, positions, members = [], [], []
        for i, count in enumerate(counts):
            end = self.num_computed[i] + count
            used = -(-end // PAGE)
            table[i, :used] = (np.arange(used) * 5 + 3 * i + 1) % (NUM_BLOCKS - 1) + 1
            new = np.arange(self.num_computed[i], end)
            positions.append(new)
            slots.append(table[i, new // PAGE] * PAGE + new % PAGE)
            self.num_computed[i] = end
            if count:
                members.append(i)
        queries = np.array([counts[i] for i in members])
        num_tokens = int(queries.sum())
        shape = StepShape(
            np.concatenate(([0], np.cumsum(queries))).astype(np.int32),
            np.array([self.num_computed[i] for i in members], dtype=np.int32),
            np.concatenate(slots).astype(np.int64),
            table[members],
            num_tokens + num_padding,
        )
        padded = np.pad(np.concatenate(positions), (0, num_padding))
        return shape, torch.from_numpy(padded.astype(np.int64))


@dataclass
class Side:
    """A decoder, its attention and its pool."""

    decoder: Decoder
    attention: AttentionBackend
    kv: list[LayerKv]

    @torch.inference_mode()
    def run(
        self, token_ids: torch.Tensor, positions: torch.Tensor, shape: StepShape
    ) -> torch.Tensor:
        """Logits of the step's tokens."""
        device = self.decoder.device
        prepared = self.attention.prepare(shape)
        hidden = self.decoder.forward(token_ids.to(device), positions.to(device), self.kv, prepared)
        assert torch.isfinite(hidden).all(), "rows past the tokens must be finite"
        return self.decoder.logits(hidden)[: shape.num_tokens].cpu()


def with_kernels(
    name: str,
    dtype: torch.dtype,
    target: Target,
    device: torch.device = CPU,
    *,
    kv_dtype: torch.dtype | None = None,
    ops: Ops | None = None,
) -> Side:
    """A family as a worker with a GPU runs it; target is what that GPU is."""
    decoder = _decoder(name, dtype, device, ops or TritonOps())
    config = decoder.config
    setup = AttentionSetup(
        shape=kv_pool.kv_shape(config, NUM_BLOCKS, PAGE),
        num_heads=config.attention.num_heads,
        kv_dtype=kv_dtype or dtype,
        windows=tuple({layer.sliding_window for layer in config.layers}),
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=config.max_model_len,
    )
    return Side(decoder, TritonAttention(setup, target, device), _pools(decoder, kv_dtype))


def with_torch(name: str, dtype: torch.dtype, *, kv_dtype: torch.dtype | None = None) -> Side:
    """The same on a CPU, with attention by its formula."""
    decoder = _decoder(name, dtype, CPU, TorchOps())
    return Side(decoder, ReferenceAttention(), _pools(decoder, kv_dtype))


def compare(ours: Side, theirs: Side, tolerance: float, steps: Sequence = STEPS) -> None:
    """Runs steps on both sides; no logit may differ by more than tolerance. They reach 2 to 5."""
    requests, generator = Requests(), torch.Generator().manual_seed(2)
    for counts in steps:
        shape, positions = requests.advance(counts, num_padding=2)
        token_ids = torch.randint(SIZES["vocab_size"], positions.shape, generator=generator)
        logits, expected = (side.run(token_ids, positions, shape) for side in (ours, theirs))
        error = float((logits - expected).abs().max())
        assert error <= tolerance, f"step {counts}: {error}"


def _decoder(name: str, dtype: torch.dtype, device: torch.device, ops: Ops) -> Decoder:
    source = RandomSource(SIZES | FAMILIES[name], CPU, torch.float32)
    return load_decoder(source, device, dtype, lambda _done, _all: None, ops)


def _pools(decoder: Decoder, kv_dtype: torch.dtype | None) -> list[LayerKv]:
    """Pools of which every slot is NaN."""
    kv = kv_pool.allocate(
        decoder.config, NUM_BLOCKS, PAGE, kv_dtype or decoder.dtype, decoder.device
    )
    for layer in kv:
        layer.key.fill_(torch.nan)
        layer.value.fill_(torch.nan)
    return list(kv)
