"""Cuts a step's attention into work items: the queries and keys that each program computes.

A tile is some queries of one request: a decode, drafts to verify or part of a prefill chunk. A tile
whose context is long compared with the step's total is split by context, so that a few long
requests fill the device as well as many short requests do.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuworker.attention.interface import StepShape
from gpuworker.core.plan import Int32Array
from gpuworker.core.ragged import ranks

ITEM_FIELDS = 8  # table start, first token, queries, first position, KV start, KV end, row, 0
MERGE_FIELDS = 4  # token, first row, splits, rows between splits
NOT_SPLIT = -1

_Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileShape:
    """How requests of one kind are cut.

    block_queries: queries per tile.
    block_keys: keys per loop iteration of the kernel; ranges begin at multiples of block_keys.
    target_items: the aimed-at number of items per KV head when tiles are split.
    min_keys: least number of keys per split; a multiple of block_keys.
    """

    block_queries: int
    block_keys: int
    target_items: int
    min_keys: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """Items and merge entries, longest items first; padding is all zeros."""

    items: Int32Array  # [num_items, ITEM_FIELDS]
    merges: Int32Array  # [num_merges, MERGE_FIELDS]
    num_partial_rows: int


@dataclass(frozen=True, slots=True)
class ListSizes:
    """Upper bounds on a work list's size for one kind of request, by number of tokens alone."""

    num_items: int
    num_merges: int
    num_partial_rows: int

    @staticmethod
    def of(num_padded_tokens: int, tile: TileShape) -> "ListSizes":
        """Bounds that hold for every step of this many tokens, whatever their contexts.

        There are at most as many tiles as tokens. All tiles together have at most target_items
        splits beyond the first of each tile. At most target_items tiles are split, because a split
        tile is longer than the fair share of an item.
        """
        split_queries = tile.target_items * tile.block_queries
        return ListSizes(
            num_items=num_padded_tokens + tile.target_items,
            num_merges=min(num_padded_tokens, split_queries),
            num_partial_rows=min(num_padded_tokens, split_queries) + split_queries,
        )


def build(
    shape: StepShape, requests: _Indices, tile: TileShape, window: int | None, first_row: int = 0
) -> WorkList:
    """Builds the work list for some requests of a step.

    Args:
        shape: the step.
        requests: [num_members] indices of the requests in the step.
        tile: how the requests are cut.
        window: sliding window or None.
        first_row: first free partial row.
    """
    if not len(requests):
        return _NOTHING
    request, first_rank, queries = _tiles(shape, requests, tile)
    first_position = first_rank + shape.seq_lens[request]
    first_position -= (shape.query_start_loc[1:] - shape.query_start_loc[:-1])[request]
    first_token = first_rank + shape.query_start_loc[request]

    kv_end = first_position + queries
    kv_start = np.zeros_like(kv_end)
    if window is not None:
        kv_start = np.maximum(first_position - window + 1, 0)
    aligned_start = kv_start // tile.block_keys * tile.block_keys
    steps = -(-(kv_end - aligned_start) // tile.block_keys)
    steps_a_split = _steps_a_split(steps, tile)
    splits = -(-steps // steps_a_split)

    columns = [request * shape.block_table.shape[1], first_token, queries, first_position]
    if splits.max() == 1:
        return WorkList(_sorted_items(columns, kv_start, kv_end, NOT_SPLIT), _NO_MERGES, 0)
    owner = np.repeat(np.arange(len(request)), splits)
    rank = ranks(splits)
    keys_a_split = (steps_a_split * tile.block_keys)[owner]
    item_start = aligned_start[owner] + rank * keys_a_split
    item_end = np.minimum(item_start + keys_a_split, kv_end[owner])
    item_start = np.maximum(item_start, kv_start[owner])
    is_split = splits > 1
    rows = np.where(is_split, splits * queries, 0)
    tile_row = first_row + np.cumsum(rows) - rows
    partial_row = np.where(is_split[owner], tile_row[owner] + rank * queries[owner], NOT_SPLIT)
    items = _sorted_items([column[owner] for column in columns], item_start, item_end, partial_row)
    return WorkList(
        items, _merges(is_split, splits, queries, first_token, tile_row), int(rows.sum())
    )


def _tiles(
    shape: StepShape, requests: _Indices, tile: TileShape
) -> tuple[_Indices, _Indices, _Indices]:
    """Request, first query within it and number of queries of each tile: [num_tiles] each."""
    starts = shape.query_start_loc
    num_queries = (starts[1:] - starts[:-1])[requests].astype(np.int64)
    if num_queries.max() <= tile.block_queries:
        return requests, np.zeros_like(num_queries), num_queries
    num_tiles = -(-num_queries // tile.block_queries)
    first_rank = ranks(num_tiles) * tile.block_queries
    queries = np.minimum(np.repeat(num_queries, num_tiles) - first_rank, tile.block_queries)
    return np.repeat(requests, num_tiles), first_rank, queries


def _sorted_items(
    columns: list[_Indices], start: _Indices, end: _Indices, partial_row: _Indices | int
) -> Int32Array:
    """Joins columns into items, longest first: [num_items, ITEM_FIELDS].

    The programs that start last then have short items, so that no long item runs alone at the end.
    """
    items = np.zeros((len(start), ITEM_FIELDS), dtype=np.int32)
    for field, column in enumerate((*columns, start, end, partial_row)):
        items[:, field] = column
    longest_first: Int32Array = items[(start - end).argsort(kind="stable")]
    return longest_first


def clear_items(first_token: int, num_tokens: int, tile: TileShape) -> Int32Array:
    """Items that write zeros to padding tokens: [num_items, ITEM_FIELDS]."""
    starts = np.arange(0, num_tokens, tile.block_queries)
    items = np.zeros((len(starts), ITEM_FIELDS), dtype=np.int32)
    items[:, 1] = first_token + starts
    items[:, 2] = np.minimum(num_tokens - starts, tile.block_queries)
    items[:, 6] = NOT_SPLIT
    return items


def _steps_a_split(steps: _Indices, tile: TileShape) -> _Indices:
    """Kernel iterations per split of each tile, even and at most the fair share: [num_tiles]."""
    least = tile.min_keys // tile.block_keys
    fair = max(least, -(-int(steps.sum()) // tile.target_items), 1)
    splits = -(-steps // fair)
    evened: _Indices = -(-steps // splits)
    return evened


def _merges(
    is_split: NDArray[np.bool_],
    splits: _Indices,
    queries: _Indices,
    first_token: _Indices,
    tile_row: _Indices,
) -> Int32Array:
    """One entry for each query of each split tile: [num_merges, MERGE_FIELDS]."""
    members = np.flatnonzero(is_split)
    owner = np.repeat(members, queries[members])
    rank = ranks(queries[members])
    merges = np.empty((len(owner), MERGE_FIELDS), dtype=np.int32)
    merges[:, 0] = first_token[owner] + rank
    merges[:, 1] = tile_row[owner] + rank
    merges[:, 2] = splits[owner]
    merges[:, 3] = queries[owner]
    return merges


_NO_MERGES: Int32Array = np.empty((0, MERGE_FIELDS), dtype=np.int32)
_NOTHING = WorkList(np.empty((0, ITEM_FIELDS), dtype=np.int32), _NO_MERGES, 0)
