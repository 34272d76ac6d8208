"""Paged attention with torch's batched matrix products: for CPUs, and correct on any device.

The bits of a query's result depend neither on the rest of the batch nor on how the prefill was
chunked. Keys are read in tiles that start at multiples of TILE, each product has the fixed depth
head_dim or TILE, and tiles are added in order. Products of fewer than MIN_ROWS rows are padded,
because BLAS computes them with another kernel.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    KvShape,
    LayerKv,
    PreparedStep,
    StepShape,
    kv_slots,
    movable,
    narrowed,
)

TILE = 128
# With fewer rows BLAS uses a matrix-vector kernel, which sums in another order.
MIN_ROWS = 4
# Queries per piece of a long prefill, so that the scores roughly fit the caches:
# 128 * 9 heads * 2048 keys is 9 MB.
MAX_QUERIES = 128


class TorchAttention(AttentionBackend):
    """Copies each request's KV tiles together and multiplies; one-token requests are batched.

    Args:
        shape: size of each layer's pool.
        num_heads: query heads; a multiple of the KV heads.
        device: the pool's device.

    Raises:
        ValueError: the block size does not divide TILE.
    """

    def __init__(self, shape: KvShape, num_heads: int, device: torch.device) -> None:
        if TILE % shape.block_size:
            raise ValueError(f"block-size must divide {TILE}, {shape.block_size} does not")
        self._shape = shape
        self._num_heads = num_heads
        self._device = device

    def prepare(self, shape: StepShape) -> PreparedStep:
        return _TorchStep(shape, self._shape, self._num_heads, self._device)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Requests with equally many queries and key tiles, computed in one batched product.

    num_queries counts padding: the last query is repeated up to MIN_ROWS rows per KV head.
    """

    query_index: torch.Tensor  # [num_reqs * num_queries] rows of the step's query
    block_index: torch.Tensor  # [num_reqs * num_kv_heads * num_blocks] rows of the pool, by head
    is_hidden: torch.Tensor  # [num_reqs, 1, 1, num_queries, num_keys]
    is_unused: torch.Tensor  # [num_reqs, 1, num_keys, 1] keys past the context
    num_queries: int


class _TorchStep(PreparedStep):
    def __init__(
        self, shape: StepShape, kv_shape: KvShape, num_heads: int, device: torch.device
    ) -> None:
        self._shape = shape
        self._device = device
        self._kv_shape = kv_shape
        self._group = num_heads // kv_shape.num_kv_heads
        self._pool_rows = self._tensor(kv_slots(shape.slot_mapping, kv_shape).reshape(-1))
        self._pieces_by_window: dict[int | None, list[_Piece]] = {}

    @property
    def slots(self) -> torch.Tensor:
        return self._tensor(self._shape.padded_slots())

    def write(self, kv: LayerKv, key: torch.Tensor, value: torch.Tensor) -> None:
        num_tokens, head_dim = self._shape.num_tokens, self._kv_shape.head_dim
        for pool, new in ((kv.key, key), (kv.value, value)):
            rows = narrowed(new[:num_tokens].reshape(-1, head_dim), pool.dtype)
            movable(pool).view(-1, head_dim).index_copy_(0, self._pool_rows, movable(rows))

    def attend(self, query: torch.Tensor, kv: LayerKv, layer: AttentionLayer) -> torch.Tensor:
        pieces = self._pieces_by_window.get(layer.sliding_window)
        if pieces is None:
            pieces = list(self._cut(layer.sliding_window))
            self._pieces_by_window[layer.sliding_window] = pieces
        out = torch.zeros_like(query)
        for piece in pieces:
            result = self._attend_piece(piece, query, kv, layer)
            # Padding repeats the last query: the same value is written twice.
            out.index_copy_(0, piece.query_index, result.to(out.dtype))
        return out

    def _attend_piece(
        self, piece: _Piece, query: torch.Tensor, kv: LayerKv, layer: AttentionLayer
    ) -> torch.Tensor:
        """Attention of one piece: [num_reqs * num_queries, num_heads, head_dim] in float32."""
        kv_heads, head_dim = self._kv_shape.num_kv_heads, self._kv_shape.head_dim
        num_reqs, num_keys = piece.is_unused.shape[0], piece.is_unused.shape[2]
        queries = query.index_select(0, piece.query_index).float() * layer.scale
        # All queries of a KV head are rows of one product: (group, query) for each request.
        queries = (
            queries.view(num_reqs, piece.num_queries, kv_heads, self._group, head_dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(num_reqs, kv_heads, -1, head_dim)
        )
        keys, values = self._tiles(kv.key, piece), self._tiles(kv.value, piece)
        values.masked_fill_(piece.is_unused, 0.0)
        scores = torch.matmul(queries, keys.transpose(2, 3))
        if layer.soft_cap is not None:
            scores = scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
        scores.view(num_reqs, kv_heads, self._group, piece.num_queries, num_keys).masked_fill_(
            piece.is_hidden, -torch.inf
        )
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        total = torch.zeros(weights.shape[:3], device=self._device)
        out = torch.zeros_like(queries)
        for start in range(0, num_keys, TILE):
            tile = weights[..., start : start + TILE]
            total += tile.sum(-1)
            out += torch.matmul(tile, values[:, :, start : start + TILE])
        out /= total[..., None]
        return (
            out.view(num_reqs, kv_heads, self._group, piece.num_queries, head_dim)
            .permute(0, 3, 1, 2, 4)
            .reshape(num_reqs * piece.num_queries, kv_heads * self._group, head_dim)
        )

    def _tiles(self, pool: torch.Tensor, piece: _Piece) -> torch.Tensor:
        """A copy of a piece's keys or values: [num_reqs, num_kv_heads, num_keys, head_dim]."""
        shape = self._kv_shape
        blocks = movable(pool).view(-1, shape.block_size * shape.head_dim)
        rows = blocks.index_select(0, piece.block_index).view(pool.dtype)
        num_reqs = piece.is_unused.shape[0]
        return rows.float().view(num_reqs, shape.num_kv_heads, -1, shape.head_dim)

    def _cut(self, window: int | None) -> list[_Piece]:
        """Cuts the batch into pieces: decodes grouped by number of tiles, other requests alone."""
        num_queries = np.diff(self._shape.query_start_loc)
        first_keys = self._first_keys(num_queries, window)
        num_tiles = -(-(self._shape.seq_lens - first_keys) // TILE)
        singles: dict[int, list[int]] = defaultdict(list)
        pieces = []
        for i in range(len(num_queries)):
            if num_queries[i] == 1:
                # Rounding to powers of two gives few pieces, and at most half of the tiles are
                # padding.
                singles[1 << int(num_tiles[i] - 1).bit_length()].append(i)
            else:
                pieces += self._cut_one(i, int(num_queries[i]), window)
        for tiles, members in singles.items():
            reqs = np.array(members)
            queries = self._shape.query_start_loc[reqs][:, None]
            positions = self._shape.seq_lens[reqs][:, None] - 1
            keys = first_keys[reqs][:, None] + np.arange(tiles * TILE)
            pieces.append(self._piece(reqs, queries, positions, keys, window))
        return pieces

    def _first_keys(
        self, num_queries: NDArray[np.integer], window: int | None
    ) -> NDArray[np.integer]:
        """First key visible to each request's first query, rounded down to a tile: [num_reqs]."""
        if window is None:
            return np.zeros_like(num_queries)
        first_positions = self._shape.seq_lens - num_queries
        firsts: NDArray[np.integer] = np.maximum(first_positions - window + 1, 0) // TILE * TILE
        return firsts

    def _cut_one(self, i: int, num_queries: int, window: int | None) -> list[_Piece]:
        """Cuts one request's queries; a piece reads only the tiles up to its last query."""
        pieces = []
        seq_len = int(self._shape.seq_lens[i])
        first_row = int(self._shape.query_start_loc[i])
        for start in range(0, num_queries, MAX_QUERIES):
            ranks = np.arange(start, min(start + MAX_QUERIES, num_queries))
            positions = seq_len - num_queries + ranks
            first = 0 if window is None else max(positions[0] - window + 1, 0) // TILE * TILE
            keys = np.arange(first, -(-(positions[-1] + 1) // TILE) * TILE)
            pieces.append(
                self._piece(
                    np.array([i]), first_row + ranks[None], positions[None], keys[None], window
                )
            )
        return pieces

    def _piece(
        self,
        reqs: NDArray[np.integer],
        queries: NDArray[np.integer],
        positions: NDArray[np.integer],
        keys: NDArray[np.integer],
        window: int | None,
    ) -> _Piece:
        """Builds a piece: the gather indices and masks of its requests.

        Args:
            reqs: [num_reqs] indices of the requests in the step.
            queries: [num_reqs, num_queries] rows of the step's query.
            positions: [num_reqs, num_queries] positions of these queries.
            keys: [num_reqs, num_keys] positions of the keys, whole tiles.
            window: sliding window or None.
        """
        missing = max(-(-MIN_ROWS // self._group) - queries.shape[1], 0)
        queries = np.pad(queries, ((0, 0), (0, missing)), mode="edge")
        positions = np.pad(positions, ((0, 0), (0, missing)), mode="edge")
        distance = positions[:, :, None] - keys[:, None, :]
        is_hidden = distance < 0
        if window is not None:
            is_hidden |= distance >= window
        shape = self._kv_shape
        block_columns = keys[:, :: shape.block_size] // shape.block_size
        table = self._shape.block_table[reqs]
        is_in_table = block_columns < table.shape[1]
        blocks = np.where(
            is_in_table,
            np.take_along_axis(table, np.minimum(block_columns, table.shape[1] - 1), axis=1),
            0,
        ).astype(np.int64)
        blocks_by_head = (
            blocks[:, None, :] * shape.num_kv_heads + np.arange(shape.num_kv_heads)[:, None]
        )
        is_unused = keys >= self._shape.seq_lens[reqs][:, None]
        # Unused block table entries may hold any number, so block 0 is read in their place.
        past = keys[:, :: shape.block_size] >= self._shape.seq_lens[reqs][:, None]
        blocks_by_head[np.broadcast_to(past[:, None, :], blocks_by_head.shape)] = 0
        return _Piece(
            query_index=self._tensor(queries.reshape(-1).astype(np.int64)),
            block_index=self._tensor(blocks_by_head.reshape(-1)),
            is_hidden=self._tensor(is_hidden)[:, None, None],
            is_unused=self._tensor(is_unused)[:, None, :, None],
            num_queries=queries.shape[1],
        )

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
