"""The passes between products in plain torch: what a CPU runs and the fused kernels must equal.

Truncation and noise are the CPU sampler's own.
"""

import torch
from torch.nn import functional

from gpuworker.attention.interface import LayerKv
from gpuworker.kernels.ops import (
    Activation,
    Adjustments,
    Draws,
    HeadNorms,
    LogitEdits,
    Ops,
    RopeTables,
    TokenPlaces,
    Verification,
)
from gpuworker.sampling.noise import gumbel
from gpuworker.sampling.truncate import Truncation, thresholds


class TorchOps(Ops):
    """Every pass as torch has it, on any device."""

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if update is not None:
            residual.add_(update)
        return _rms_norm(residual, weight, eps)

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate).mul_(up)
        return functional.gelu(gate, approximate="tanh").mul_(up)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        kv: LayerKv,
        places: TokenPlaces,
        norms: HeadNorms | None,
        rope: RopeTables | None,
    ) -> torch.Tensor:
        num_kv_heads = kv.key.shape[1]
        num_turned = qkv.shape[1] - num_kv_heads
        num_heads = num_turned - num_kv_heads
        # Queries and keys lie next to each other: one rotation serves both.
        heads, value = qkv[:, :num_turned], qkv[:, num_turned:]
        if norms is not None:
            query = _rms_norm(heads[:, :num_heads], norms.query, norms.eps)
            key = _rms_norm(heads[:, num_heads:], norms.key, norms.eps)
            heads = torch.cat((query, key), dim=1)
        if rope is not None:
            heads = _rotate(heads, *places.rope_rows(rope, heads.dtype))
        places.attention.write(kv, heads[:, num_heads:], value)
        return heads[:, :num_heads]

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        used = (edits.rows >= 0).nonzero().squeeze(1)
        places = (edits.rows[used].long(), edits.token_ids[used].long())
        logits.index_put_(places, edits.values[used], accumulate=True)

    def adjust_logits(self, logits: torch.Tensor, adjustments: Adjustments) -> None:
        a = adjustments
        vocab_size = logits.shape[1]
        slots = a.slots.long()
        counts = a.output_counts[slots].float()
        for i, (start, count) in enumerate(
            zip(a.draft_starts.tolist(), a.draft_counts.tolist(), strict=True)
        ):
            drafts = a.drafts[start : start + count].long()
            counts[i].index_add_(0, drafts, torch.ones_like(counts[i, :count]))
        is_seen = _bits(a.prompt_bits[slots], vocab_size) | (counts > 0)
        repetition = a.repetition[:, None]
        penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
        values = torch.where(is_seen, penalized, logits)
        loss = a.presence[:, None] + a.frequency[:, None] * counts
        values = torch.where(counts > 0, values - loss, values)
        constrained = (a.grammar_rows >= 0).nonzero().squeeze(1)
        allowed = _bits(a.grammar_bits[a.grammar_rows[constrained].long()], vocab_size)
        values[constrained] = values[constrained].masked_fill(~allowed, -torch.inf)
        heat = torch.where(a.temperature > 0, a.temperature, 1.0)
        logits.copy_(values / heat[:, None])

    def sample(self, scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
        truncation = Truncation(draws.top_p, draws.top_k.long(), draws.min_p)
        floor, _ = thresholds(scaled, scaled.sort(descending=True).values, truncation)
        every = torch.arange(scaled.shape[1], device=scaled.device)[None]
        scores = gumbel(draws.seeds, draws.positions, every).add_(scaled)
        scores.masked_fill_(scaled < floor[:, None], -torch.inf)
        drawn = torch.where(draws.is_drawn != 0, scores.argmax(-1), scaled.argmax(-1))
        return drawn.int()

    def accept(self, token_ids: torch.Tensor, verification: Verification) -> torch.Tensor:
        v = verification
        kept = []
        columns = (v.sample_starts, v.num_samples, v.draft_starts)
        for start, count, first in zip(*(column.tolist() for column in columns), strict=True):
            drafts = v.drafts[first : first + max(count - 1, 0)]
            is_wrong = token_ids[start : start + len(drafts)] != drafts
            wrong = is_wrong.nonzero()
            kept.append(int(wrong[0]) + 1 if len(wrong) else count)
        return torch.tensor(kept, dtype=torch.int32, device=token_ids.device)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """A rotated copy of heads, [num_tokens, num_heads, head_dim]; see TokenPlaces.rope_rows."""
    rotary_dim = cosines.shape[-1]
    if rotary_dim == heads.shape[-1]:
        return _turn(heads, cosines, sines)
    turned = _turn(heads[..., :rotary_dim], cosines, sines)
    return torch.cat((turned, heads[..., rotary_dim:]), dim=-1)


def _turn(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    half = sines.shape[-1]
    first, second = heads[..., :half], heads[..., half:]
    turned = heads * cosines
    turned[..., :half].addcmul_(second, sines, value=-1)
    turned[..., half:].addcmul_(first, sines)
    return turned


def _bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Words of 32 bits, lowest first, as booleans: [num_rows, num_bits]."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return (((words[:, :, None] >> shifts) & 1) != 0).flatten(1)[:, :num_bits]
