"""Token sequences that spell a bad word.

A model can write a word at the start of its output, after a space or on a new line, and tokenizers
have different tokens for each case. A word is forbidden in all three spellings; a word that begins
with a space is forbidden only as given.
"""

from router.text.tokenizer import TextTokenizer


def bad_word_sequences(word: str, tokenizer: TextTokenizer) -> list[list[int]]:
    """Distinct token sequences that spell the word; none when the tokenizer drops all of it."""
    spellings = [_encode(word, tokenizer)]
    if not word.startswith(" "):
        spellings += [_encode(f" {word}", tokenizer), _on_a_new_line(word, tokenizer)]
    distinct = dict.fromkeys(tuple(ids) for ids in spellings if ids)
    return [list(ids) for ids in distinct]


def _on_a_new_line(word: str, tokenizer: TextTokenizer) -> list[int]:
    """The word's tokens without the space that some tokenizers put before every text."""
    line_break = _encode("\n", tokenizer)
    ids = _encode(f"\n{word}", tokenizer)
    is_apart = ids[: len(line_break)] == line_break
    return ids[len(line_break) :] if is_apart else []


def _encode(text: str, tokenizer: TextTokenizer) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).tolist()
    return ids
