"""The reference for all backends: the attention formula, one request and one head at a time.

The reference is slow on purpose. It reads only the slots that a request's context covers, so the
contents of other slots and of unused block table entries cannot affect the result.
"""

import torch

from gpuworker.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    LayerKv,
    PreparedStep,
    StepShape,
    movable,
    narrowed,
)


class ReferenceAttention(AttentionBackend):
    """Attention computed in `dtype` (float64 by default), whatever the inputs' type."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self._dtype = dtype

    def prepare(self, shape: StepShape) -> PreparedStep:
        return _ReferenceStep(shape, self._dtype)


class _ReferenceStep(PreparedStep):
    def __init__(self, shape: StepShape, dtype: torch.dtype) -> None:
        self._shape = shape
        self._dtype = dtype

    @property
    def slots(self) -> torch.Tensor:
        return torch.from_numpy(self._shape.padded_slots())

    def write(self, kv: LayerKv, key: torch.Tensor, value: torch.Tensor) -> None:
        block_size = kv.key.shape[2]
        for token, slot in enumerate(self._shape.slot_mapping.tolist()):
            block, offset = divmod(slot, block_size)
            kv.key[block, :, offset] = narrowed(key[token], kv.key.dtype)
            kv.value[block, :, offset] = narrowed(value[token], kv.value.dtype)

    def attend(self, query: torch.Tensor, kv: LayerKv, layer: AttentionLayer) -> torch.Tensor:
        out = torch.zeros_like(query)
        starts = self._shape.query_start_loc.tolist()
        for i, seq_len in enumerate(self._shape.seq_lens.tolist()):
            queries = query[starts[i] : starts[i + 1]]
            keys, values = self._context(kv, i, seq_len)
            out[starts[i] : starts[i + 1]] = self._attend_one(queries, keys, values, layer)
        return out

    def _context(self, kv: LayerKv, i: int, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request's context, each [seq_len, num_kv_heads, head_dim]."""
        block_size = kv.key.shape[2]
        table = self._shape.block_table[i].tolist()
        places = [(table[p // block_size], p % block_size) for p in range(seq_len)]
        blocks, offsets = torch.tensor(places, device=kv.key.device).T
        keys, values = (
            movable(pool)[blocks, :, offsets].view(pool.dtype).to(self._dtype)
            for pool in (kv.key, kv.value)
        )
        return keys, values

    def _attend_one(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: AttentionLayer,
    ) -> torch.Tensor:
        """softmax(cap(q k^T * scale) + mask) v of one request: [num_queries, heads, head_dim]."""
        num_queries, num_heads, _ = queries.shape
        seq_len, num_kv_heads, _ = keys.shape
        key_position = torch.arange(seq_len, device=queries.device)
        query_position = seq_len - num_queries + torch.arange(num_queries, device=queries.device)
        distance = query_position[:, None] - key_position[None, :]
        is_visible = distance >= 0
        if layer.sliding_window is not None:
            is_visible &= distance < layer.sliding_window
        heads = []
        for head in range(num_heads):
            kv_head = head * num_kv_heads // num_heads
            scores = queries[:, head].to(self._dtype) @ keys[:, kv_head].T * layer.scale
            if layer.soft_cap is not None:
                scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
            scores = scores.masked_fill(~is_visible, -torch.inf)
            heads.append(torch.softmax(scores, dim=-1) @ values[:, kv_head])
        return torch.stack(heads, dim=1).to(queries.dtype)
