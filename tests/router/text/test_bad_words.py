"""How words that must not come out are spelled in tokens."""

import pytest

from router.text.bad_words import bad_word_sequences
from router.text.tokenizer import TextTokenizer
from tests.router.tiny_models import byte_fallback_tokenizer, byte_level_tokenizer

TOKENIZERS = {"byte level": byte_level_tokenizer, "sentencepiece": byte_fallback_tokenizer}


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS.keys())
@pytest.mark.parametrize(
    "written", ["hello", "a hello", "a\nhello", "world", "a world.", "a\nworld"]
)
def test_a_word_is_found_wherever_a_model_writes_it(make, written):
    tokenizer = TextTokenizer(make())
    word = "world" if "world" in written else "hello"
    ids = tokenizer.encode(written, add_special_tokens=False).tolist()
    found = [
        sequence
        for sequence in bad_word_sequences(word, tokenizer)
        if any(ids[i : i + len(sequence)] == sequence for i in range(len(ids)))
    ]
    assert found


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS.keys())
def test_a_word_with_a_space_before_it_is_meant_so(make):
    tokenizer = TextTokenizer(make())
    (sequence,) = bad_word_sequences(" hello", tokenizer)
    assert sequence == tokenizer.encode(" hello", add_special_tokens=False).tolist()


def test_spellings_are_distinct():
    tokenizer = TextTokenizer(byte_level_tokenizer())
    sequences = bad_word_sequences("hello", tokenizer)
    assert len(sequences) == 2
    assert all(sequences)
