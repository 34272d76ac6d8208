"""`Ops` as fused Triton kernels; each kernel reads its data once."""

from functools import cache

import torch
import triton

from gpuworker.attention.interface import FLOAT8_TYPES, LayerKv
from gpuworker.kernels.device import layers, sampling
from gpuworker.kernels.launch import HeldKernel
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

# Elements of a gate that a program computes.
GATE_BLOCK = 1024
# Elements that a program holds at a time; sampling walks the vocabulary in blocks of this size.
_BLOCK = 4096
_BLOCK_SEARCH = 512
_HEADS_A_PROGRAM = 8


class TritonOps(Ops):
    """Every operation as one kernel, on the GPU of its tensors."""

    def add_rms_norm(
        self, residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        normed = torch.empty_like(residual)
        kernel = _norm_kernel(residual.shape[1], update is not None)
        added = residual if update is None else update
        kernel((residual.shape[0], 1, 1), normed, residual, added, weight, eps)
        return normed

    def gate(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
        kernel = _gate_kernel(size, activation)
        kernel((num_tokens, -(-size // GATE_BLOCK), 1), out, gate_up)
        return out

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        kv: LayerKv,
        tokens: StepTokens,
        norms: HeadNorms | None,
        rope: RopeTables | None,
    ) -> torch.Tensor:
        num_tokens, all_heads, head_dim = qkv.shape
        num_kv_heads, page = kv.key.shape[1], kv.key.shape[2]
        num_heads = all_heads - 2 * num_kv_heads
        query = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
        rotary_dim = 0 if rope is None else 2 * rope.cosines.shape[1]
        limit = torch.finfo(kv.key.dtype).max if kv.key.dtype in FLOAT8_TYPES else 0.0
        shape = (num_heads, num_kv_heads, head_dim, rotary_dim, page)
        kernel = _rotate_kernel(shape, norms is not None, limit)
        # Without norms the kernel does not read these arguments; any tensor of the type will do.
        query_norm, key_norm, eps = (qkv, qkv, 0.0)
        if norms is not None:
            query_norm, key_norm, eps = norms.query, norms.key, norms.eps
        cosines, sines = (qkv, qkv) if rope is None else (rope.cosines, rope.sines)
        blocks = -(-num_heads // _HEADS_A_PROGRAM) + -(-num_kv_heads // _HEADS_A_PROGRAM)
        kernel(
            (num_tokens, blocks, 1),
            query,
            kv.key,
            kv.value,
            qkv,
            tokens.positions,
            tokens.attention.slots,
            query_norm,
            key_norm,
            cosines,
            sines,
            eps,
        )
        return query

    def edit_logits(self, logits: torch.Tensor, edits: LogitEdits) -> None:
        kernel = _edit_kernel(logits.shape[1])
        kernel((len(edits.rows), 1, 1), logits, edits.rows, edits.token_ids, edits.values)

    def adjust_logits(self, logits: torch.Tensor, adjustments: Adjustments) -> None:
        a = adjustments
        num_samples, vocab_size = logits.shape
        _adjust_kernel(vocab_size)(
            (num_samples, -(-vocab_size // _BLOCK), 1),
            logits,
            a.slots,
            a.output_counts,
            a.prompt_bits,
            a.grammar_rows,
            a.grammar_bits,
            a.draft_starts,
            a.draft_counts,
            a.drafts,
            *a.numbers.values(),
        )

    def sample(self, scaled: torch.Tensor, draws: Draws) -> torch.Tensor:
        num_samples, vocab_size = scaled.shape
        token_ids = torch.empty(num_samples, dtype=torch.int32, device=scaled.device)
        _sample_kernel(vocab_size)(
            (num_samples, 1, 1),
            token_ids,
            scaled,
            draws.seeds,
            draws.positions,
            *draws.numbers.values(),
            draws.is_drawn,
        )
        return token_ids

    def accept(self, token_ids: torch.Tensor, verification: Verification) -> torch.Tensor:
        v = verification
        num_kept = torch.empty_like(v.num_samples)
        _accept_kernel()(
            (len(num_kept), 1, 1),
            num_kept,
            token_ids,
            v.sample_starts,
            v.num_samples,
            v.draft_starts,
            v.drafts,
        )
        return num_kept


@cache
def _norm_kernel(size: int, has_update: bool) -> HeldKernel:
    block = triton.next_power_of_2(size)
    constants = {"SIZE": size, "BLOCK": block, "HAS_UPDATE": has_update}
    return HeldKernel(layers.add_rms_norm, constants, {"num_warps": _num_warps(block)})


@cache
def _gate_kernel(size: int, activation: Activation) -> HeldKernel:
    constants = {"SIZE": size, "BLOCK": GATE_BLOCK, "IS_GELU": activation == "gelu_tanh"}
    return HeldKernel(layers.gated_activation, constants, {"num_warps": 4})


@cache
def _rotate_kernel(
    shape: tuple[int, int, int, int, int], has_norm: bool, limit: float
) -> HeldKernel:
    """shape: query heads, KV heads, head_dim, rotary_dim and page."""
    num_heads, num_kv_heads, head_dim, rotary_dim, page = shape
    constants = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": triton.next_power_of_2(head_dim),
        "ROTARY_DIM": rotary_dim,
        "HAS_NORM": has_norm,
        "PAGE": page,
        "BLOCK_HEADS": _HEADS_A_PROGRAM,
        "LIMIT": limit,
    }
    return HeldKernel(layers.rotate_and_write, constants, {"num_warps": 4})


@cache
def _edit_kernel(vocab_size: int) -> HeldKernel:
    return HeldKernel(sampling.edit_logits, {"VOCAB_SIZE": vocab_size}, {"num_warps": 1})


@cache
def _adjust_kernel(vocab_size: int) -> HeldKernel:
    constants = {"VOCAB_SIZE": vocab_size, "BLOCK": _BLOCK}
    return HeldKernel(sampling.adjust_logits, constants, {"num_warps": 8})


@cache
def _sample_kernel(vocab_size: int) -> HeldKernel:
    constants = {"VOCAB_SIZE": vocab_size, "BLOCK": _BLOCK, "BLOCK_SEARCH": _BLOCK_SEARCH}
    return HeldKernel(sampling.sample_tokens, constants, {"num_warps": 8})


@cache
def _accept_kernel() -> HeldKernel:
    return HeldKernel(sampling.accept_drafts, {"BLOCK": 64}, {"num_warps": 1})


def _num_warps(block: int) -> int:
    """Number of warps that gives about 16 elements per thread."""
    return min(max(block // 512, 1), 16)
