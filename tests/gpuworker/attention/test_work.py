"""The work lists of Triton attention: every visible key once, and never more room than promised."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.attention.interface import StepShape
from gpuworker.attention.triton.work import ListSizes, TileShape, build, clear_items

requests_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.integers(0, 700)), min_size=1, max_size=8
)
tile_strategy = st.builds(
    lambda queries, keys, target, least: TileShape(queries, keys, target, keys * least),
    st.sampled_from([1, 2, 5, 16]),
    st.sampled_from([16, 32, 64]),
    st.integers(1, 40),
    st.integers(1, 4),
)


def step_shape(requests):
    """A step of requests given as (queries, tokens computed before)."""
    queries = np.array([q for q, _ in requests], dtype=np.int32)
    seq_lens = np.array([q + computed for q, computed in requests], dtype=np.int32)
    start_loc = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    table = np.zeros((len(requests), 50), dtype=np.int32)
    return StepShape(start_loc, seq_lens, np.zeros(start_loc[-1], np.int64), table, start_loc[-1])


@settings(max_examples=60, deadline=None)
@given(requests_strategy, tile_strategy, st.none() | st.integers(1, 300))
def test_every_visible_key_of_every_query_is_in_exactly_one_item(requests, tile, window):
    shape = step_shape(requests)
    lists = build(shape, np.arange(len(requests)), tile, window)
    seen = [
        np.zeros(int(length), dtype=int)
        for length in np.repeat(shape.seq_lens, np.diff(shape.query_start_loc))
    ]
    request_of = np.repeat(np.arange(len(requests)), np.diff(shape.query_start_loc))
    for table_start, token, queries, position, start, end, _, _ in lists.items:
        assert 1 <= queries <= tile.block_queries
        assert start < end
        for rank in range(queries):
            assert table_start == 50 * request_of[token + rank]
            local = token + rank - shape.query_start_loc[request_of[token + rank]]
            computed = requests[request_of[token + rank]][1]
            assert position + rank == computed + local
            seen[token + rank][start : min(end, position + rank + 1)] += 1
    for token, counts in enumerate(seen):
        local = token - shape.query_start_loc[request_of[token]]
        position = requests[request_of[token]][1] + local
        first = 0 if window is None else max(position - window + 1, 0)
        assert (counts[first : position + 1] == 1).all()


@settings(max_examples=60, deadline=None)
@given(requests_strategy, tile_strategy, st.none() | st.integers(1, 300))
def test_splits_have_rows_of_their_own_and_merges_name_them(requests, tile, window):
    lists = build(step_shape(requests), np.arange(len(requests)), tile, window, first_row=7)
    rows_by_token = {}
    for _, token, queries, _, _, _, row, _ in lists.items:
        for rank in range(queries if row >= 0 else 0):
            rows_by_token.setdefault(token + rank, []).append(row + rank)
    every_row = sorted(row for rows in rows_by_token.values() for row in rows)
    assert every_row == list(range(7, 7 + lists.num_partial_rows))
    merged = {
        token: [first + split * stride for split in range(splits)]
        for token, first, splits, stride in lists.merges
    }
    assert {token: sorted(rows) for token, rows in rows_by_token.items()} == merged


@settings(max_examples=100, deadline=None)
@given(requests_strategy, tile_strategy, st.none() | st.integers(1, 300))
def test_a_list_never_outgrows_its_sizes(requests, tile, window):
    shape = step_shape(requests)
    lists = build(shape, np.arange(len(requests)), tile, window)
    sizes = ListSizes.of(shape.num_padded_tokens, tile)
    assert len(lists.items) <= sizes.num_items
    assert len(lists.merges) <= sizes.num_merges
    assert lists.num_partial_rows <= sizes.num_partial_rows


def test_one_long_context_is_split_to_fill_the_device():
    tile = TileShape(4, 64, target_items=32, min_keys=128)
    lists = build(step_shape([(1, 65535)]), np.array([0]), tile, None)
    assert len(lists.items) == 32


def test_many_long_contexts_are_still_split_evenly():
    # A peer leaves splitting at a dozen requests and doubles its latency there.
    tile = TileShape(4, 64, target_items=66, min_keys=128)
    lists = build(step_shape([(1, 32767)] * 16), np.arange(16), tile, None)
    keys = lists.items[:, 5] - lists.items[:, 4]
    assert len(lists.items) >= 64
    assert keys.max() <= 2 * keys.min()


def test_verify_rows_are_split_like_decodes():
    tile = TileShape(4, 64, target_items=32, min_keys=128)
    decode = build(step_shape([(1, 8191)]), np.array([0]), tile, None)
    verify = build(step_shape([(4, 8188)]), np.array([0]), tile, None)
    assert np.array_equal(decode.items[:, 4:6], verify.items[:, 4:6])


def test_the_longest_items_come_first():
    tile = TileShape(1, 16, target_items=4, min_keys=16)
    lists = build(step_shape([(1, 20), (1, 900), (1, 300)]), np.arange(3), tile, None)
    keys = lists.items[:, 5] - lists.items[:, 4]
    assert (np.diff(keys) <= 0).all()


def test_padding_is_cleared_once():
    items = clear_items(10, 7, TileShape(4, 64, 1, 64))
    tokens = [t for item in items for t in range(item[1], item[1] + item[2])]
    assert tokens == list(range(10, 17))
    assert (items[:, 4] == items[:, 5]).all()
    assert (items[:, 6] < 0).all()
