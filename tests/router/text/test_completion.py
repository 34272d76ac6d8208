"""Tokens to text with stop strings: what counts, what shows, where each token's text begins."""

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


def test_tokens_after_the_one_that_completes_a_stop_string_do_not_count():
    token_ids = ids("hello END of it")
    advance = completion(["END"]).push(token_ids)
    assert (advance.text, advance.stop) == ("hello ", "END")
    assert advance.num_tokens == len(ids("hello END"))


def test_a_stop_string_may_span_the_bytes_of_a_character():
    token_ids = ids("a🎉b")
    text = completion(["🎉"])
    shown = ""
    for token_id in token_ids[:-1]:
        advance = text.push([token_id])
        shown += advance.text
    assert (shown, advance.stop) == ("a", "🎉")


def test_the_first_min_tokens_tokens_are_not_searched():
    advance = completion(["l"], min_tokens=2).push(ids("xlxl"))
    assert (advance.text, advance.num_tokens) == ("xlx", 4)


def test_what_is_held_at_the_end_is_shown():
    text = completion(["END"])
    assert text.push(ids("an EN")).text == "an "
    assert text.finish().text == "EN"


def test_bytes_held_to_the_end_may_complete_a_stop_string():
    tokenizer = TextTokenizer(byte_fallback_tokenizer())
    text = completion(["é"], tokenizer=tokenizer, prompt=[1])
    assert text.push([3 + byte for byte in "aé".encode()]).text == ""
    last = text.finish()
    assert (last.text, last.stop) == ("a", "é")


def test_offsets_say_where_each_tokens_text_begins():
    text = completion(has_offsets=True)
    first = text.push(ids("hello w🎉"))
    assert list(first.text_offsets) == [0, 5, 7, 7, 7]
    assert list(text.push_silent([262]).text_offsets) == [8]


@given(text=st.text(alphabet="helo w🎉", max_size=20))
def test_offsets_cut_the_text_into_the_tokens_own_texts(text):
    tokenizer = TextTokenizer(byte_level_tokenizer())
    token_ids = ids(text)
    offsets = completion(has_offsets=True).push(token_ids).text_offsets
    for position, offset in enumerate(offsets):
        assert text[:offset] == tokenizer.decode(token_ids[:position])
