"""Tokens to text with stop strings: what counts, what shows, where each token's text begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.completion import CompletionText
from router.text.stop_strings import StopScanner, StopStrings
from router.text.tokenizer import TextTokenizer
from tests.router.tiny_models import byte_fallback_tokenizer, byte_level_tokenizer


def completion(stops=(), *, tokenizer=None, prompt=(), includes_stop=False, **options):
    tokenizer = tokenizer or TextTokenizer(byte_level_tokenizer())
    scanner = StopScanner(StopStrings(stops), includes_stop=includes_stop) if stops else None
    return CompletionText(tokenizer.detokenizer(prompt), scanner, **options)


def ids(text):
    return TextTokenizer(byte_level_tokenizer()).encode(text, add_special_tokens=False).tolist()


def shown(text, token_ids=()):
    """The text that can be shown once these tokens are read."""
    text.read(token_ids)
    return text.take(10_000).text


def test_tokens_after_the_one_that_completes_a_stop_string_do_not_count():
    text = completion(["END"])
    assert text.read(ids("hello END of it")) == (len(ids("hello END")), "END")
    assert text.close() is None
    assert text.take(10_000).text == "hello "


def test_a_stop_string_may_span_the_bytes_of_a_character():
    token_ids = ids("a🎉b")
    text = completion(["🎉"])
    found = [text.read([token_id]) for token_id in token_ids[:-1]]
    assert found == [(1, None)] * (len(found) - 1) + [(1, "🎉")]
    assert shown(text) == "a"


@pytest.mark.parametrize(
    ("min_tokens", "count", "text"),
    [(0, 2, "x"), (1, 2, "x"), (2, 4, "xlx"), (3, 4, "xlx"), (4, 6, "xlxlx"), (6, 6, "xlxlxl")],
)
def test_a_stop_string_counts_when_a_token_after_the_first_min_tokens_completes_it(
    min_tokens, count, text
):
    stopping = completion(["l"], min_tokens=min_tokens)
    assert stopping.read(ids("xlxlxl")) == (count, "l" if min_tokens < 6 else None)
    stopping.close()
    assert shown(stopping) == text


@pytest.mark.parametrize("stops", [["lxl"], ["lxl", "x"], ["lxl", "xlx"]])
def test_a_stop_string_that_begins_in_the_first_min_tokens_is_found_and_not_shown(stops):
    text = completion(stops, min_tokens=3)
    assert shown(text, ids("xlx")) == "x"
    assert text.read(ids("lo")) == (1, "lxl")
    assert shown(text) == ""


def test_what_is_held_at_the_end_is_shown():
    text = completion(["END"])
    assert shown(text, ids("an EN")) == "an "
    assert text.close() is None
    assert shown(text) == "EN"


def test_bytes_held_to_the_end_may_complete_a_stop_string():
    tokenizer = TextTokenizer(byte_fallback_tokenizer())
    text = completion(["é"], tokenizer=tokenizer, prompt=[1])
    assert shown(text, [3 + byte for byte in "aé".encode()]) == ""
    assert text.close() == "é"
    assert shown(text) == "a"


def test_a_suffix_follows_all_text_but_a_stop_string():
    text = completion(["END"])
    text.read(ids("an EN"))
    text.close("<stop>")
    assert shown(text) == "an EN<stop>"
    text = completion(["END"])
    text.read(ids("an END"))
    text.close("<stop>")
    assert shown(text) == "an "


def test_offsets_say_where_each_tokens_text_begins():
    text = completion(has_offsets=True)
    text.read(ids("hello w🎉"))
    assert text.take(10_000).text_offsets == [0, 5, 7, 7, 7]
    text.skip(1)
    assert text.take(10_000).text_offsets == [8]


@given(text=st.text(alphabet="helo w🎉", max_size=20))
def test_offsets_cut_the_text_into_the_tokens_own_texts(text):
    tokenizer = TextTokenizer(byte_level_tokenizer())
    token_ids = ids(text)
    reading = completion(has_offsets=True)
    reading.read(token_ids)
    for position, offset in enumerate(reading.take(10_000).text_offsets):
        assert text[:offset] == tokenizer.decode(token_ids[:position])


@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=8), most=st.integers(300, 900))
def test_text_is_taken_in_order_whole_and_in_pieces_of_bounded_size(cuts, most):
    token_ids = ids("hello world, ") * sum(cuts)
    text = completion(["zzz"], has_offsets=True)
    begin = 0
    for cut in cuts:
        text.read(token_ids[begin : begin + cut])
        begin += cut
    text.close()
    pieces = []
    while (piece := text.take(most)).num_tokens:
        assert piece.num_tokens <= max(most, 256 + 400)
        assert len(piece.text_offsets) == piece.num_tokens
        pieces.append(piece)
    assert sum(piece.num_tokens for piece in pieces) == begin
    expected = TextTokenizer(byte_level_tokenizer()).decode(token_ids[:begin])
    assert "".join(piece.text for piece in pieces) == expected
