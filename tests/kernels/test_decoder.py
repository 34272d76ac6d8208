"""Whole forwards of every family under the interpreter, against torch and the reference.

Both run the same decoder on the same weights: one with fused passes and paged attention kernels,
the other with their twins and attention's formula, over a pool of its own each.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
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
from tests.kernels.batches import CPU, POISON_BLOCK, poison_allocations

# Largest difference of a logit; they reach 2 to 5.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-2}
# Small, with eight-bit floats.
DEVICE = Target("sm90", 4)
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
        prepared = self.attention.prepare(shape)
        hidden = self.decoder.forward(token_ids, positions, self.kv, prepared)
        assert torch.isfinite(hidden).all(), "rows past the tokens must be finite"
        return self.decoder.logits(hidden)[: shape.num_tokens]


def both(
    hf: dict, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, ops: Ops | None = None
) -> tuple[Side, Side]:
    """The kernels and the twins, over equal weights; unused slots of both pools are NaN."""
    hf, kv_dtype = SIZES | hf, kv_dtype or dtype
    sides = []
    for ops_here in (ops or TritonOps(), TorchOps()):
        source = RandomSource(hf, CPU, torch.float32)
        decoder = load_decoder(source, CPU, dtype, lambda _done, _all: None, ops_here)
        config = source.config
        kv = kv_pool.allocate(config, NUM_BLOCKS, PAGE, kv_dtype, CPU)
        for layer in kv:
            layer.key.fill_(torch.nan)
            layer.value.fill_(torch.nan)
        attention: AttentionBackend = ReferenceAttention()
        if not sides:
            setup = AttentionSetup(
                shape=kv_pool.kv_shape(config, NUM_BLOCKS, PAGE),
                num_heads=config.attention.num_heads,
                kv_dtype=kv_dtype,
                windows=tuple({layer.sliding_window for layer in config.layers}),
                max_num_seqs=2,
                max_num_batched_tokens=32,
                max_model_len=config.max_model_len,
            )
            attention = TritonAttention(setup, DEVICE, CPU)
        sides.append(Side(decoder, attention, list(kv)))
    return sides[0], sides[1]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_computes_the_same_with_kernels_and_with_torch(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    ours, theirs = both(FAMILIES[name], dtype)
    poison_allocations(monkeypatch)
    compare(ours, theirs, TOLERANCE[dtype])


def test_a_model_over_eight_bit_keys_and_values_computes_the_same() -> None:
    # Torch writes on both sides: the interpreter rounds to eight bits wrongly, but reads them well.
    ours, theirs = both(FAMILIES["qwen3"], torch.float32, torch.float8_e4m3fn, TorchOps())
    compare(ours, theirs, TOLERANCE[torch.float32])


def compare(ours: Side, theirs: Side, tolerance: float) -> None:
    """Runs all steps on both sides."""
    requests, generator = Requests(), torch.Generator().manual_seed(2)
    for counts in STEPS:
        shape, positions = requests.advance(counts, num_padding=2)
        token_ids = torch.randint(SIZES["vocab_size"], positions.shape, generator=generator)
        logits, expected = (side.run(token_ids, positions, shape) for side in (ours, theirs))
        error = float((logits - expected).abs().max())
        assert error <= tolerance, f"step {counts}: {error}"
