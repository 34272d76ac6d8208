"""The least number of tokens a text can have: never more than it has, and often enough to tell."""

import sys
import time
import unicodedata
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from router.text.token_bound import _MOST_NFC_SHORTENS, compile_bound
from router.text.tokenizer import TextTokenizer, load_model_text
from tests.router.tiny_models import (
    SPACE,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
)

MUCH = 10**9
MARKED = " a long name".replace(" ", SPACE)


def copy_of(tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.to_str())


def byte_level(*, normalizer=None, without="", added=()):
    tokenizer = copy_of(byte_level_tokenizer())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if without:
        alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(without))
        tokenizer.model = models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    tokenizer.add_tokens(list(added))
    return tokenizer


@cache
def tokenizers():
    greedy = AddedToken("<|gap|>", lstrip=True, rstrip=True)
    long_normalized = AddedToken("a long name", normalized=True)
    return {
        "byte level": byte_level(),
        "without some bytes": byte_level(without="aéÃ"),
        "composed": byte_level(normalizer=normalizers.NFC()),
        "composed without some bytes": byte_level(normalizer=normalizers.NFC(), without="aÃ©"),
        "with a greedy token": byte_level(added=[greedy]),
        "with a long token": byte_level(added=[AddedToken("hello hello hello hello")]),
        "byte fallback": copy_of(byte_fallback_tokenizer()),
        "byte fallback with a long token": _with(byte_fallback_tokenizer(), long_normalized),
    }


def _with(tokenizer, token):
    copy = copy_of(tokenizer)
    copy.add_tokens([token])
    return copy


words = st.sampled_from(
    ["hello", "  ", "\n", "<|end|>", "<|gap|>", MARKED, "a long name", "e\u0301", "\u212b", "漢字"]
)
texts = st.lists(st.one_of(words, st.text(max_size=8)), max_size=30).map("".join)


@pytest.mark.parametrize("name", tokenizers())
@example(text=MARKED * 5, enough=MUCH)
@given(text=texts, enough=st.sampled_from([0, 3, MUCH]))
def test_no_text_has_fewer_tokens(name, text, enough):
    tokenizer = tokenizers()[name]
    bound = compile_bound(tokenizer)
    assert bound.least(text, enough) <= len(tokenizer.encode(text).ids)


def test_texts_of_the_longest_tokens_come_close():
    for name, text in {
        "byte level": "hello" * 700,
        "byte fallback": "lorem" * 700,
        "with a long token": "hello hello hello hello" * 100,
    }.items():
        tokenizer = tokenizers()[name]
        least = compile_bound(tokenizer).least(text, MUCH)
        assert 0.3 * len(tokenizer.encode(text).ids) <= least


def test_letters_tell_where_white_space_may_be_swallowed():
    bound = compile_bound(tokenizers()["with a greedy token"])
    assert bound.least(" " * 1000, MUCH) == 0
    assert bound.least("hello " * 1000, MUCH) == 1000


def test_counting_ends_when_there_are_more_than_enough():
    bound = compile_bound(tokenizers()["byte level"])
    assert 100 < bound.least("hello" * 1_000_000, 100) < 20_000
    assert bound.least("hello" * 1_000_000, MUCH) == 1_000_000


@pytest.mark.parametrize(
    "tokenizer",
    [
        metaspace_tokenizer(),
        byte_level(normalizer=normalizers.Strip()),
        byte_level(normalizer=normalizers.NFKC()),
        byte_level(normalizer=normalizers.Replace("hello", "")),
        byte_level(normalizer=normalizers.Replace(Regex("a+"), "b")),
        byte_level(
            normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.StripAccents()])
        ),
        Tokenizer(models.BPE(vocab={"a": 0, "?": 1}, merges=[], unk_token="?", fuse_unk=True)),
    ],
    ids=lambda tokenizer: str(tokenizer.normalizer or type(tokenizer.model).__name__)[:40],
)
def test_nothing_is_claimed_of_pipelines_that_may_lose_text(tokenizer):
    assert compile_bound(tokenizer) is None


def test_nothing_is_claimed_where_text_between_words_is_removed():
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
    )
    assert compile_bound(tokenizer) is None


def test_composing_shortens_no_text_by_more_than_is_said():
    """Each character's bytes, spread evenly over what it decomposes to, the most of each piece."""
    chars = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    most: dict[str, float] = {}
    for char in chars:
        pieces = unicodedata.normalize("NFD", char)
        for piece in pieces:
            most[piece] = max(most.get(piece, 0), len(char.encode()) / len(pieces))
    for char in chars:
        before = sum(most[piece] for piece in unicodedata.normalize("NFD", char))
        if unicodedata.is_normalized("NFC", char):
            assert before <= _MOST_NFC_SHORTENS * len(char.encode())


def test_a_tokenizer_without_a_bound_claims_nothing():
    assert TextTokenizer(copy_of(metaspace_tokenizer())).least_tokens("hello" * 1000, MUCH) == 0


def test_the_real_model_tells_of_megabytes_in_less_than_it_takes_to_read_a_tenth(model_path):
    tokenizer = load_model_text(model_path).tokenizer
    prose = "The quick brown fox jumps over the lazy dog; then 12 things happened. " * 45_000
    for text in (prose, "漢字" * 500_000, "\u00e9" + prose, "=" * 3_000_000):
        began = time.process_time()
        assert tokenizer.least_tokens(text, 8192) > 8192
        told = time.process_time()
        tokenizer.encode(text[: len(text) // 10], add_special_tokens=False)
        assert told - began < time.process_time() - told
