"""Sentencepiece out of a GGUF vocabulary, against its definition: join the best pair, repeat."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.gguf_tokenizer import build_gguf_tokenizer
from router.text.gguf_vocabulary import read_vocabulary
from router.text.tokenizer import TextTokenizer

MARK = "\u2581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTERS = [MARK, *"abcdé"]
WORDS = [
    "ab", "bc", "abc", "cd", "abcd", "aa", "aaa", MARK + "a", MARK + "ab", MARK + MARK, "bcd",
    "da", "dab", MARK + "cd", "éa",
]  # fmt: skip


def metadata(*, user_defined=(), **changes):
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    pieces += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    pieces += [(token, 0.0, USER_DEFINED) for token in user_defined]
    pieces += [(word, -float(rank), NORMAL) for rank, word in enumerate(WORDS)]
    pieces += [(letter, -100.0 - rank, NORMAL) for rank, letter in enumerate(LETTERS)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece for piece, _, _ in pieces],
        "tokenizer.ggml.scores": [score for _, score, _ in pieces],
        "tokenizer.ggml.token_type": [kind for _, _, kind in pieces],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def by_definition(text):
    """Of the neighbours whose joint piece has the best score, the leftmost are joined first."""
    score = {word: -float(rank) for rank, word in enumerate(WORDS)}
    pieces = list(text)
    while True:
        pairs = [
            (-score[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in score
        ]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(text=st.text(alphabet="abcd é", max_size=25))
def test_pieces_are_joined_as_sentencepiece_joins_them(text):
    tokenizer = build_gguf_tokenizer(read_vocabulary(metadata(add_space_prefix=False)))
    assert tokenizer.encode(text).tokens == by_definition(text.replace(" ", MARK))


@given(text=st.text(max_size=25))
@pytest.mark.parametrize("has_prefix", [True, False])
def test_any_text_comes_back(text, has_prefix):
    text = text.replace(MARK, " ")
    tokenizer = TextTokenizer(
        build_gguf_tokenizer(read_vocabulary(metadata(add_space_prefix=has_prefix)))
    )
    token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    assert tokenizer.decode(token_ids, keep_special_tokens=True) == text


def test_a_space_is_put_before_the_text_where_the_model_wants_one():
    for has_prefix, tokens in ((True, [MARK + "ab"]), (False, ["ab"])):
        tokenizer = build_gguf_tokenizer(read_vocabulary(metadata(add_space_prefix=has_prefix)))
        assert tokenizer.encode("ab").tokens == tokens


def test_what_is_not_in_the_vocabulary_falls_back_to_its_bytes():
    tokens = (
        build_gguf_tokenizer(read_vocabulary(metadata(add_space_prefix=False))).encode("a€").tokens
    )
    assert tokens == ["a", "<0xE2>", "<0x82>", "<0xAC>"]


def test_user_defined_tokens_are_found_before_anything_is_joined():
    tokenizer = build_gguf_tokenizer(
        read_vocabulary(metadata(user_defined=["   ", "\n\n", "bc"], add_space_prefix=False))
    )
    assert tokenizer.encode("abcd   a\n\n").tokens == ["a", "bc", "d", MARK * 3, "a", "\n\n"]
    assert TextTokenizer(tokenizer).decode(tokenizer.encode("a   a").ids) == "a   a"


def test_a_sequence_begins_with_the_token_that_the_model_wants():
    tokenizer = build_gguf_tokenizer(read_vocabulary(metadata(add_bos_token=True)))
    assert tokenizer.encode("ab").tokens == ["<s>", MARK + "ab"]
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == [MARK + "ab"]
