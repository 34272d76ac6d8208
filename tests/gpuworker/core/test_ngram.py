"""Prompt lookup proposes what followed the latest, longest repetition."""

import numpy as np

from gpuworker.core.ngram import MAX_NGRAM, MIN_NGRAM, propose
from tests.gpuworker.driver import int32


def proposed(*tokens: int, max_num_drafts: int = 3) -> list[int]:
    return propose(int32(*tokens), max_num_drafts).tolist()


def test_proposes_what_followed_before() -> None:
    assert proposed(1, 2, 3, 4, 5, 1, 2) == [3, 4, 5]
    assert proposed(1, 2, 3, 4, 5, 1, 2, max_num_drafts=1) == [3]


def test_one_repeated_token_is_not_enough() -> None:
    assert proposed(1, 2, 3, 9, 2) == []


def test_nothing_is_proposed_for_nothing() -> None:
    assert proposed() == []
    assert proposed(1) == []
    assert proposed(1, 1) == []
    assert proposed(1, 2, 1, 2, max_num_drafts=0) == []


def test_the_longest_match_wins_over_a_later_one() -> None:
    assert proposed(7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2) == [50, 8, 1]


def test_of_equal_matches_the_latest_wins() -> None:
    assert proposed(1, 2, 50, 1, 2, 60, 70, 1, 2) == [60, 70, 1]


def test_a_run_of_one_token_goes_on() -> None:
    assert proposed(4, 4, 4, 4) == [4]
    assert proposed(4, 4, 4) == [4]


def test_equals_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        tokens = rng.integers(0, 4, int(rng.integers(0, 30))).tolist()
        assert proposed(*tokens) == plain_search(tokens, 3)


def plain_search(tokens: list[int], count: int) -> list[int]:
    for length in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        if length >= len(tokens):
            continue
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                return tokens[start + length : start + length + count]
    return []
