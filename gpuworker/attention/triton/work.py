"""Cuts a step's attention into work items: which program computes which queries and keys.

A tile is some queries of one request. Tiles whose context is long against the step's total are
split, so that few long requests fill the device as well as many short ones. Decodes, drafts to
verify and prefill chunks are all tiles.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuworker.attention.interface import StepShape
from gpuworker.core.plan import Int32Array

ITEM_FIELDS = 8  # table start, first token, queries, first position, KV start, KV end, row, 0
MERGE_FIELDS = 4  # token, first row, splits, rows between splits
NOT_SPLIT = -1

_Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileShape:
    """How one kind of request is cut.

    block_queries: queries of a tile.
    block_keys: keys of a kernel's step; ranges begin at multiples of it.
    target_items: splits are chosen to give about so many items a KV head.
    min_keys: splits are not made smaller than this; a multiple of block_keys.
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
    """Room of a work list for a kind of request and a number of tokens, whatever their contexts."""

    num_items: int
    num_merges: int
    num_partial_rows: int

    @staticmethod
    def of(num_padded_tokens: int, tile: TileShape) -> "ListSizes":
        """Bounds that hold for every step.

        Tiles are at most as many as tokens. Splits beyond a tile's first are at most target_items,
        and so are tiles that are split, since each of them is longer than the fair share.
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
    """The work of some requests of a step.

    Args:
        shape: the step.
        requests: [num_members] which of its requests.
        tile: how they are cut.
        window: sliding window or None.
        first_row: first partial row that is free.
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
    rank = _ranks(splits)
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
    first_rank = _ranks(num_tiles) * tile.block_queries
    queries = np.minimum(np.repeat(num_queries, num_tiles) - first_rank, tile.block_queries)
    return np.repeat(requests, num_tiles), first_rank, queries


def _sorted_items(
    columns: list[_Indices], start: _Indices, end: _Indices, partial_row: _Indices | int
) -> Int32Array:
    """Items of their columns, longest first: [num_items, ITEM_FIELDS].

    The items that start last are then short, so that no long item runs alone at the end.
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
    """Even splits of each tile, none longer than the step's fair share: [num_tiles]."""
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
    rank = _ranks(queries[members])
    merges = np.empty((len(owner), MERGE_FIELDS), dtype=np.int32)
    merges[:, 0] = first_token[owner] + rank
    merges[:, 1] = tile_row[owner] + rank
    merges[:, 2] = splits[owner]
    merges[:, 3] = queries[owner]
    return merges


_NO_MERGES: Int32Array = np.empty((0, MERGE_FIELDS), dtype=np.int32)
_NOTHING = WorkList(np.empty((0, ITEM_FIELDS), dtype=np.int32), _NO_MERGES, 0)


def _ranks(counts: _Indices) -> _Indices:
    """0, 1, ... within each group: [sum(counts)] for groups of `counts` members."""
    ends: _Indices = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    ranks: _Indices = np.arange(total, dtype=np.int64) - np.repeat(ends - counts, counts)
    return ranks
