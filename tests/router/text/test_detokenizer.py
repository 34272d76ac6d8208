"""Detokenizing token by token gives what decoding the whole sequence gives."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from router.text.detokenizer import compile_decoder
from router.text.errors import UnsupportedTokenizerError
from router.text.tokenizer import TextTokenizer
from tests.router.tiny_models import (
    SPACE,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    metaspace_tokenizer,
)

KINDS = {
    "byte_level": byte_level_tokenizer,
    "byte_fallback": byte_fallback_tokenizer,
    "metaspace": metaspace_tokenizer,
}
REPLACEMENT = "\ufffd"


def pieces_of(tokenizer, token_ids, cuts, *, keep_special_tokens=False, prompt=()):
    """The text of each push when the sequence is cut at `cuts`."""
    stream = tokenizer.detokenizer(prompt, keep_special_tokens=keep_special_tokens)
    bounds = [0, *sorted(c % (len(token_ids) + 1) for c in cuts), len(token_ids)]
    texts = [stream.push(token_ids[a:b]) for a, b in pairwise(bounds)]
    return [*texts, stream.finish()]


def sequences(kind):
    return st.lists(st.integers(0, KINDS[kind]().get_vocab_size() - 1), max_size=40)


def assert_equal_but_for_an_unfinished_end(ours, whole):
    """A character that is unfinished at the end is left out; at once, it gives U+FFFD."""
    assert whole.startswith(ours)
    assert set(whole[len(ours) :]) <= {REPLACEMENT}


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@given(data=st.data(), cuts=st.lists(st.integers(0, 100), max_size=6), keep=st.booleans())
def test_any_sequence_in_any_pieces_equals_decoding_at_once(kind, data, cuts, keep):
    token_ids = data.draw(sequences(kind))
    pieces = pieces_of(TextTokenizer(KINDS[kind]()), token_ids, cuts, keep_special_tokens=keep)
    whole = KINDS[kind]().decode(token_ids, skip_special_tokens=not keep)
    assert_equal_but_for_an_unfinished_end("".join(pieces), whole)


@given(data=st.data(), cuts=st.lists(st.integers(0, 100), max_size=6), keep=st.booleans())
def test_byte_fallback_sequences_equal_decoding_at_once(data, cuts, keep):
    # Bytes of real characters among the ids, or a valid run would hardly ever be drawn.
    words = st.sampled_from([[3 + byte for byte in "é🎉你".encode()], [259], [2], [3 + 0xF0]])
    parts = data.draw(st.lists(st.one_of(words, sequences("byte_fallback")), max_size=6))
    letter = byte_fallback_tokenizer().token_to_id("a")
    token_ids = [token_id for part in parts for token_id in part] + [letter]
    pieces = pieces_of(
        TextTokenizer(byte_fallback_tokenizer()), token_ids, cuts, keep_special_tokens=keep
    )
    whole = byte_fallback_tokenizer().decode(token_ids, skip_special_tokens=not keep)
    assert "".join(pieces) == whole


@given(text=st.text(alphabet="aé🎉", min_size=1, max_size=8), num_missing=st.integers(0, 3))
def test_of_bytes_at_the_very_end_whole_characters_are_shown(text, num_missing):
    tokenizer = TextTokenizer(byte_fallback_tokenizer())
    data = text.encode()
    data = data[: max(1, len(data) - num_missing)]
    shown = tokenizer.decode([3 + byte for byte in data])
    assert shown == data.decode(errors="ignore")


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(max_size=40))
def test_no_broken_character_shows_at_any_point_of_a_whole_text(kind, text):
    text = text.replace(REPLACEMENT, "")
    tokenizer = TextTokenizer(KINDS[kind]())
    token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    stream = tokenizer.detokenizer(())
    shown = [stream.push([token_id]) for token_id in token_ids]
    assert not any(REPLACEMENT in piece for piece in shown)
    assert "".join(shown) + stream.finish() == KINDS[kind]().decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet="hello wor. é🎉", max_size=20), at=st.integers(0, 60))
def test_text_that_continues_a_prompt_is_the_rest_of_the_whole(kind, text, at):
    tokenizer = TextTokenizer(KINDS[kind]())
    token_ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    at = min(at, len(token_ids))
    prompt, output = token_ids[:at], token_ids[at:]
    ours = "".join(pieces_of(tokenizer, output, [], prompt=prompt))
    before = "".join(pieces_of(tokenizer, prompt, []))
    assert before + ours == tokenizer.decode(token_ids)


def test_an_emoji_shows_with_its_last_byte_and_not_before():
    tokenizer = TextTokenizer(byte_level_tokenizer())
    token_ids = tokenizer.encode("🎉", add_special_tokens=False).tolist()
    stream = tokenizer.detokenizer(())
    assert [stream.push([i]) for i in token_ids] == [*[""] * (len(token_ids) - 1), "🎉"]


def test_special_tokens_are_left_out_unless_kept():
    tokenizer = TextTokenizer(byte_level_tokenizer())
    token_ids = tokenizer.encode("hello<|end|>", add_special_tokens=False).tolist()
    assert tokenizer.decode(token_ids) == "hello"
    assert tokenizer.decode(token_ids, keep_special_tokens=True) == "hello<|end|>"


def test_ids_beyond_the_vocabulary_have_no_text():
    for make in KINDS.values():
        tokenizer = TextTokenizer(make())
        assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 7]) == ""


def test_an_unfinished_character_at_the_end_is_left_out():
    for make in KINDS.values():
        tokenizer = TextTokenizer(make())
        token_ids = tokenizer.encode("h🎉", add_special_tokens=False).tolist()
        assert REPLACEMENT not in tokenizer.decode(token_ids[:-1])


def test_bytes_that_are_no_character_show_as_decoding_at_once_shows_them():
    tokenizer = byte_fallback_tokenizer()
    token_ids = [3 + 0xFF, 3 + 0x41, 264]
    ours = TextTokenizer(tokenizer).decode(token_ids)
    assert ours == tokenizer.decode(token_ids)
    assert ours.count(REPLACEMENT) == 2


def test_the_count_of_characters_runs_ahead_of_held_bytes():
    tokenizer = TextTokenizer(byte_fallback_tokenizer())
    stream = tokenizer.detokenizer((1,))
    assert stream.push([3 + byte for byte in "é".encode()]) == ""
    assert stream.num_chars == 1


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]),
    ],
)
def test_a_decoder_that_is_not_known_is_refused_by_name(decoder):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        tokenizer.decoder = decoder
    with pytest.raises(UnsupportedTokenizerError, match=r"decoder .* is not supported"):
        TextTokenizer(tokenizer)


def test_gemma_style_decoders_keep_the_first_space():
    spec = json.loads(Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).to_str())["decoder"]
    assert spec is None
    steps = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    decoding = compile_decoder({"type": "Sequence", "decoders": steps}, [SPACE + "a"], frozenset())
    assert decoding.start((), keep_special_tokens=False).push([0]) == " a"
