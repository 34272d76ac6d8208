"""A text that is rebuilt from any token on is the rest of the text that was there before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.completion import CompletionText
from router.text.stop_strings import StopScanner, StopStrings
from router.text.tokenizer import TextTokenizer
from tests.router.tiny_models import (
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
)

TOKENIZERS = [
    TextTokenizer(make())
    for make in (byte_level_tokenizer, byte_fallback_tokenizer, metaspace_tokenizer)
]
# Of the alphabets of all tokenizers, so that they come up.
STOPS = ["a", "he", "hello", " w", "el", "or", "\ufffd"]


def begin(tokenizer, stops, **fields):
    scanner = StopScanner(StopStrings(stops)) if stops else None
    detokenizer = tokenizer.detokenizer([5, 6], keep_special_tokens=False)
    return CompletionText(detokenizer, scanner, has_offsets=True, **fields)


def everything(text):
    parts, num_tokens, offsets = [], 0, []
    while (piece := text.take(1)).num_tokens or piece.text:
        parts.append(piece.text)
        num_tokens += piece.num_tokens
        offsets.extend(piece.text_offsets)
    return "".join(parts), num_tokens, offsets


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["bytes", "byte fallback", "metaspace"])
@given(
    chances=st.lists(st.integers(0, 10**6), max_size=40),
    stops=st.lists(st.sampled_from(STOPS), max_size=3),
    cut=st.integers(0, 40),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    min_tokens=st.integers(0, 20),
)
def test_what_is_left_out_is_what_the_caller_has(tokenizer, chances, stops, cut, sizes, min_tokens):
    token_ids = [chance % tokenizer.vocab_size for chance in chances]
    whole = begin(tokenizer, stops, min_tokens=min_tokens)
    num_before, stop = 0, None
    while num_before < min(cut, len(token_ids)) and stop is None:
        _, stop = whole.read(token_ids[num_before : num_before + 1])
        num_before += everything(whole)[1]
    rest_ids = token_ids[num_before:] if stop is None else []
    read_whole = whole.read(rest_ids)
    end_whole = whole.close()

    rebuilt = begin(tokenizer, stops, min_tokens=min_tokens, num_unwanted=num_before)
    position, found = 0, None
    while position < len(token_ids) and found is None:
        size = sizes[position % len(sizes)]
        count, found = rebuilt.read(token_ids[position : position + size])
        position += count
    assert found == (stop or read_whole[1])
    assert rebuilt.close() == end_whole
    assert everything(rebuilt) == everything(whole)
    assert rebuilt.num_read == whole.num_read
