"""The one interface of attention: a flat mixed batch over a paged KV cache.

Prefill chunks, decodes and speculative rows are requests of one batch that differ only in how many
queries they have. A backend prepares a step once (`prepare`) and then serves every layer of it.
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
    """What differs between layers: the score scale, window and soft cap.

    sliding_window: a query at position p sees keys in (p - window, p]; None sees all.
    soft_cap: scores become cap * tanh(score / cap); None leaves them.
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
    """One layer's pool; each is [num_blocks, num_kv_heads, block_size, head_dim].

    A head's block is contiguous, so that one descriptor or one pointer walks it.
    """

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepShape:
    """Where a step's tokens stand, as host arrays; see FlatBatch."""

    query_start_loc: Int32Array  # [num_reqs + 1]
    seq_lens: Int32Array  # [num_reqs]
    slot_mapping: Int64Array  # [num_tokens]
    block_table: Int32Array  # [num_reqs, max_blocks]
    num_padded_tokens: int  # rows of query, key and value; those past num_tokens mean nothing

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
        """The slot of each row, NO_SLOT for those past num_tokens: [num_padded_tokens]."""
        slots = np.full(self.num_padded_tokens, NO_SLOT, dtype=np.int32)
        slots[: self.num_tokens] = self.slot_mapping
        return slots


class PreparedStep(Protocol):
    """One step's attention, ready to run once per layer."""

    @property
    def has_fixed_layout(self) -> bool:
        """Whether addresses and launches depend on the padded size alone.

        A CUDA graph captured of such a step can be replayed for any other of that size.
        """
        return False

    @property
    def slots(self) -> torch.Tensor:
        """[num_padded_tokens] int32 on the device; NO_SLOT for rows past num_tokens."""

    def write(self, kv: LayerKv, key: torch.Tensor, value: torch.Tensor) -> None:
        """Puts the step's keys and values in their slots; what does not fit is clamped.

        Only for devices without fused kernels, which write by `slots`.

        Args:
            kv: the layer's pool, changed in place.
            key: [num_padded_tokens, num_kv_heads, head_dim].
            value: as key.
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
            kv: the layer's pool, holding this step's keys and values too.
            layer: scale, window, soft cap.

        Returns:
            [num_padded_tokens, num_heads, head_dim]; rows past num_tokens are finite and otherwise
            unspecified.
        """


class AttentionBackend(Protocol):
    """Prepares steps; one backend serves the whole model."""

    def prepare(self, shape: StepShape) -> PreparedStep:
        """Does the host-side work of a step once, for all layers."""


def narrowed(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values in a pool's type.

    Values beyond the range of an eight-bit type are clamped; conversion alone would give NaN.
    """
    if dtype in FLOAT8_TYPES:
        limit = torch.finfo(dtype).max
        values = values.clamp(-limit, limit)
    return values.to(dtype)


def movable(values: torch.Tensor) -> torch.Tensor:
    """A view in a type that torch can gather and scatter, as it cannot eight-bit floats."""
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
