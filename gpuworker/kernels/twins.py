"""The passes between products in plain torch: what the fused kernels must equal, and what a CPU
runs.
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
from gpuworker.sampling.draw import draw

EIGHT_BIT_TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


class TorchOps(Ops):
    """Every pass as torch has it, on any device."""

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if update is not None:
            residual.add_(update)
        wide = residual.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return (wide * scale).to(residual.dtype) * weight

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return functional.silu(gate.float()).to(gate.dtype) * up
        return functional.gelu(gate.float(), approximate="tanh").to(gate.dtype) * up

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        kv: LayerKv,
        places: TokenPlaces,
        norms: HeadNorms | None,
        rope: RopeTables | None,
    ) -> torch.Tensor:
        num_kv_heads, page = kv.key.shape[1], kv.key.shape[2]
        num_heads = qkv.shape[1] - 2 * num_kv_heads
        counts = [num_heads, num_kv_heads, num_kv_heads]
        query, key, value = torch.split(qkv.float(), counts, dim=1)
        if norms is not None:
            query = _head_norm(query, norms.query, norms.eps)
            key = _head_norm(key, norms.key, norms.eps)
        if rope is not None:
            query = _rotate(query, places.positions, rope)
            key = _rotate(key, places.positions, rope)
        written = (places.slots >= 0).nonzero().squeeze(1)
        slots = places.slots[written].long()
        for pool, new in ((kv.key, key), (kv.value, value)):
            heads = new[written]
            if pool.dtype in EIGHT_BIT_TYPES:
                limit = torch.finfo(pool.dtype).max
                heads = heads.clamp(-limit, limit)
            pool[slots // page, :, slots % page] = heads.to(pool.dtype)
        queries: torch.Tensor = query.to(qkv.dtype)
        return queries

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        used = (edits.rows >= 0).nonzero().squeeze(1)
        places = (edits.rows[used].long(), edits.token_ids[used].long())
        logits.index_put_(places, edits.values[used], accumulate=True)

    def adjust_logits(self, logits: torch.Tensor, adjustments: Adjustments) -> None:
        a = adjustments
        is_penalized = (a.repetition != 1) | (a.presence != 0) | (a.frequency != 0)
        for i in is_penalized.nonzero().squeeze(1).tolist():
            _penalize(logits[i], a, i)
        constrained = (a.grammar_rows >= 0).nonzero().squeeze(1)
        if len(constrained):
            allowed = _bits(a.grammar_bits[a.grammar_rows[constrained].long()], logits.shape[1])
            logits[constrained] = logits[constrained].masked_fill(~allowed, -torch.inf)
        logits.div_(torch.where(a.temperature > 0, a.temperature, 1.0)[:, None])

    def sample(self, scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
        return draw(scaled, draws).int()

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


def _penalize(logits: torch.Tensor, a: Adjustments, i: int) -> None:
    """Penalties of the i-th sample; logits is its [vocab_size]."""
    slot, start = int(a.slots[i]), int(a.draft_starts[i])
    counts = a.output_counts[slot].float()
    drafts = a.drafts[start : start + int(a.draft_counts[i])].long()
    drafts = drafts[drafts >= 0]
    counts.index_add_(0, drafts, torch.ones(len(drafts), device=counts.device))
    is_seen = _bits(a.prompt_bits[slot][None], len(logits))[0] | (counts > 0)
    penalized = torch.where(logits > 0, logits / a.repetition[i], logits * a.repetition[i])
    values = torch.where(is_seen, penalized, logits)
    loss = a.presence[i] + a.frequency[i] * counts
    logits.copy_(torch.where(counts > 0, values - loss, values))


def _head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    scale = (heads.square().mean(-1, keepdim=True) + eps).rsqrt()
    return heads * scale * weight.float()


def _rotate(heads: torch.Tensor, positions: torch.Tensor, rope: RopeTables) -> torch.Tensor:
    half = rope.cosines.shape[1]
    cosine, sine = rope.cosines[positions][:, None], rope.sines[positions][:, None]
    sizes = [half, half, heads.shape[-1] - 2 * half]
    first, second, rest = torch.split(heads, sizes, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat((*turned, rest), dim=-1)


def _bits(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Words of 32 bits, lowest first, as booleans: [num_rows, num_bits]."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return (((words[:, :, None] >> shifts) & 1) != 0).flatten(1)[:, :num_bits]
