"""The interface of every attention backend: a flat mixed batch over a paged KV cache.

Prefill chunks, decodes and drafts to verify are requests of one batch; they differ only in their
number of queries. A backend prepares a step once (`prepare`), then computes each layer with it.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from gpuworker.core.input_batch import FlatBatch
from gpuworker.core.plan import Int32Array, Int64Array

NO_SLOT = -1
FLOAT8_TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The parameters that differ between layers: score scale, window and soft cap.

    sliding_window: a query at position p sees keys in (p - window, p]; None: all keys up to p.
    soft_cap: scores become cap * tanh(score / cap); None: scores are unchanged.
    """

    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class KvShape:
    """Size of the KV pool of one layer."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's key and value pools, [num_blocks, num_kv_heads, block_size, head_dim] each.

    The part of a block that belongs to one head is contiguous: a kernel reads that part with one
    descriptor or one pointer.
    """

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepShape:
    """The arrays of a FlatBatch that attention reads, on the host."""

    query_start_loc: Int32Array  # [num_reqs + 1]
    seq_lens: Int32Array  # [num_reqs]
    slot_mapping: Int64Array  # [num_tokens]
    block_table: Int32Array  # [num_reqs, max_blocks]
    num_padded_tokens: int  # rows of query, key and value; rows past num_tokens are padding

    @staticmethod
    def of(batch: FlatBatch, num_padded_tokens: int) -> "StepShape":
        """The attention's view of a flat batch."""
        return StepShape(
            batch.query_start_loc,
            batch.seq_lens,
            batch.slot_mapping,
            batch.block_table,
            num_padded_tokens,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.slot_mapping)

    def padded_slots(self) -> Int32Array:
        """The slot of each row, NO_SLOT for padding rows: [num_padded_tokens]."""
        slots = np.full(self.num_padded_tokens, NO_SLOT, dtype=np.int32)
        slots[: self.num_tokens] = self.slot_mapping
        return slots


class PreparedStep(Protocol):
    """One step's attention, ready to run once per layer."""

    @property
    def has_fixed_layout(self) -> bool:
        """Whether tensor addresses and kernel launches depend on num_padded_tokens alone.

        A CUDA graph captured from such a step can be replayed for any other step of that size.
        """
        return False

    @property
    def slots(self) -> torch.Tensor:
        """[num_padded_tokens] int32 on the device; NO_SLOT for rows past num_tokens."""

    def write(self, kv: LayerKv, key: torch.Tensor, value: torch.Tensor) -> None:
        """Writes the step's keys and values to their slots, clamped to the pool's type.

        Only for devices without fused kernels; fused kernels write to `slots` themselves.

        Args:
            kv: the layer's pool, changed in place.
            key: [num_padded_tokens, num_kv_heads, head_dim].
            value: the same shape as key.
        """
        block_size = kv.key.shape[2]
        tokens = (self.slots >= 0).nonzero().squeeze(1)
        slots = self.slots[tokens].long()
        for pool, new in ((kv.key, key), (kv.value, value)):
            rows = narrowed(new[tokens], pool.dtype)
            movable(pool)[slots // block_size, :, slots % block_size] = movable(rows)

    def attend(self, query: torch.Tensor, kv: LayerKv, layer: AttentionLayer) -> torch.Tensor:
        """Attention of every query over its request's context, up to its own position.

        Args:
            query: [num_padded_tokens, num_heads, head_dim].
            kv: the layer's pool; this step's keys and values are already written.
            layer: scale, window, soft cap.

        Returns:
            [num_padded_tokens, num_heads, head_dim]; rows past num_tokens are finite and otherwise
            unspecified.
        """


class AttentionBackend(Protocol):
    """Prepares steps; a worker has one backend for all layers."""

    def prepare(self, shape: StepShape) -> PreparedStep:
        """Does the host-side work of a step once, for all layers."""


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts keys or values to a pool's type.

    Values beyond the range of an eight-bit type are clamped; a plain conversion would give NaN.
    """
    if dtype in FLOAT8_TYPES:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def movable(values: torch.Tensor) -> torch.Tensor:
    """A view in a type that torch can gather and scatter; torch cannot do so for 8-bit floats."""
    return values.view(torch.uint8) if values.dtype in FLOAT8_TYPES else values


def kv_slots(slot_mapping: Int64Array, shape: KvShape) -> Int64Array:
    """Rows of a layer's pool seen as [num_blocks * num_kv_heads * block_size, head_dim].

    Returns:
        [num_tokens, num_kv_heads] the row of each token's key (and value) for each head.
    """
    blocks, offsets = divmod(slot_mapping, shape.block_size)
    heads = blocks[:, None] * shape.num_kv_heads + range(shape.num_kv_heads)
    slots: Int64Array = heads * shape.block_size + offsets[:, None]
    return slots
