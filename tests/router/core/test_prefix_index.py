"""Prefixes as chains of hashes, and an index of them that stays within what a pool can hold."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from router.core.prefix_index import CHUNK_TOKENS, PrefixIndex, prefix_of

LONG = np.arange(10 * CHUNK_TOKENS, dtype=np.int32)


def test_only_whole_chunks_count_and_never_the_last_token():
    assert len(prefix_of(LONG)) == 9
    assert len(prefix_of(LONG[: CHUNK_TOKENS + 1])) == 1
    assert len(prefix_of(LONG[:CHUNK_TOKENS])) == 0
    assert len(prefix_of(LONG[:0])) == 0


@given(at=st.integers(0, 10 * CHUNK_TOKENS - 1))
def test_prefixes_agree_exactly_up_to_the_first_different_token(at):
    other = LONG.copy()
    other[at] += 1
    pairs = zip(prefix_of(LONG), prefix_of(other), strict=True)
    assert [a == b for a, b in pairs] == [n < at // CHUNK_TOKENS for n in range(9)]


def test_a_very_long_prompt_is_hashed_up_to_a_limit():
    assert len(prefix_of(np.zeros(10**6, np.int32))) == 256


def test_the_index_matches_the_longest_beginning():
    index = PrefixIndex(10**6)
    assert index.num_matched(prefix_of(LONG)) == 0
    index.use(prefix_of(LONG[: 5 * CHUNK_TOKENS + 1]))
    assert index.num_matched(prefix_of(LONG)) == 5
    assert index.num_matched(prefix_of(LONG + 1)) == 0


def test_it_holds_no_more_than_the_pool_and_drops_old_tails_first():
    index = PrefixIndex(12 * CHUNK_TOKENS)
    index.use(prefix_of(LONG))
    index.use(prefix_of(LONG + 1))
    assert len(index) == 12
    assert index.num_matched(prefix_of(LONG)) == 3
    assert index.num_matched(prefix_of(LONG + 1)) == 9


def test_using_a_prefix_keeps_it():
    index = PrefixIndex(20 * CHUNK_TOKENS)
    for prompt in (LONG, LONG + 1, LONG, LONG + 2):
        index.use(prefix_of(prompt))
    assert [index.num_matched(prefix_of(LONG + n)) for n in range(3)] == [9, 2, 9]
