"""`Ops` in plain torch: CPUs run these, and the fused kernels must give equal results."""

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
    StepTokens,
    Verification,
)
from gpuworker.sampling.draw import draw


class TorchOps(Ops):
    """Every operation in torch, on any device."""

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
        tokens: StepTokens,
        norms: HeadNorms | None,
        rope: RopeTables | None,
    ) -> torch.Tensor:
        num_kv_heads = kv.key.shape[1]
        num_turned = qkv.shape[1] - num_kv_heads
        num_heads = num_turned - num_kv_heads
        # Queries and keys are adjacent in qkv, so that one rotation covers both.
        heads, value = qkv[:, :num_turned], qkv[:, num_turned:]
        if norms is not None:
            query = _rms_norm(heads[:, :num_heads], norms.query, norms.eps)
            key = _rms_norm(heads[:, num_heads:], norms.key, norms.eps)
            heads = torch.cat((query, key), dim=1)
        if rope is not None:
            heads = _rotate(heads, *tokens.rope_rows(rope, heads.dtype))
        tokens.attention.write(kv, heads[:, num_heads:], value)
        return heads[:, :num_heads]

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        used = (edits.rows >= 0).nonzero().squeeze(1)
        index = (edits.rows[used].long(), edits.token_ids[used].long())
        logits.index_put_(index, edits.values[used], accumulate=True)

    def adjust_logits(self, logits: torch.Tensor, adjustments: Adjustments) -> None:
        a = adjustments
        n = a.numbers
        is_penalized = (
            (n["repetition_penalty"] != 1)
            | (n["presence_penalty"] != 0)
            | (n["frequency_penalty"] != 0)
        )
        for i in is_penalized.nonzero().squeeze(1).tolist():
            _penalize(logits[i], a, i)
        constrained = (a.grammar_rows >= 0).nonzero().squeeze(1)
        if len(constrained):
            allowed = _bits(a.grammar_bits[a.grammar_rows[constrained].long()], logits.shape[1])
            logits[constrained] = logits[constrained].masked_fill(~allowed, -torch.inf)
        logits.div_(torch.where(n["temperature"] > 0, n["temperature"], 1.0)[:, None])

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
    """Applies the penalties of sample i in place; logits is [vocab_size]."""
    slot, start = int(a.slots[i]), int(a.draft_starts[i])
    counts = a.output_counts[slot].float()
    drafts = a.drafts[start : start + int(a.draft_counts[i])].long()
    drafts = drafts[drafts >= 0]
    counts.index_add_(0, drafts, torch.ones(len(drafts), device=counts.device))
    is_seen = _bits(a.prompt_bits[slot][None], len(logits))[0] | (counts > 0)
    repetition, presence, frequency = (
        a.numbers[f"{name}_penalty"][i] for name in ("repetition", "presence", "frequency")
    )
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    values = torch.where(is_seen, penalized, logits)
    loss = presence + frequency * counts
    logits.copy_(torch.where(counts > 0, values - loss, values))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).mul_(weight).to(x.dtype)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """A rotated copy of heads, [num_tokens, num_heads, head_dim]; see StepTokens.rope_rows."""
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
    """Unpacks 32-bit words, lowest bit first, to booleans: [num_rows, num_bits]."""
    shifts = torch.arange(32, device=words.device, dtype=torch.int32)
    return (((words[:, :, None] >> shifts) & 1) != 0).flatten(1)[:, :num_bits]
