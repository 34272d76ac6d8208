"""A lower bound on the number of tokens of a text, found without tokenizing the text.

Tokenizing a megabyte takes a second, the bound a few milliseconds. Tokens divide a text into
pieces. So for any set of counted bytes, a text has at least

    counted bytes of the text / most counted bytes that one token of the vocabulary stands for

tokens. Two sets are counted: all bytes, and ASCII letters alone. Letters often give the better
bound, because the longest tokens of vocabularies are runs of spaces and dashes. Bytes without a
token are not counted, because the tokenizer drops these bytes. The bound holds for pipelines that
drop nothing else: byte-level BPE, BPE that falls back to bytes, pre-tokenizers that remove nothing,
normalizers that never shorten a text, and NFC. A post-processor only adds tokens. For any other
pipeline the bound is 0.
"""

import json
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models

from router.text.detokenizer import BYTE_BY_CHAR, token_bytes

# The largest factor by which NFC shortens UTF-8, over all of Unicode: 3.5 bytes become 1.
_MOST_NFC_SHORTENS = 4

_LETTERS = frozenset(string.ascii_letters.encode())
_ALL_BYTES = frozenset(range(256))
_NOT_IN_UTF8 = frozenset([0xC0, 0xC1, *range(0xF5, 0x100)])
_SLICE_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class ByteCount:
    """The counted bytes, all but `others`; one token has at most `most` of them."""

    others: bytes
    most: int

    def least(self, text: str, enough: int) -> int:
        """Lower bound on the text's number of tokens; counting stops once it exceeds `enough`."""
        num_counted = 0
        for begin in range(0, len(text), _SLICE_CHARS):
            piece = text[begin : begin + _SLICE_CHARS].encode()
            num_counted += len(piece.translate(None, self.others))
            if num_counted > enough * self.most:
                break
        return -(-num_counted // self.most)


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The counted sets of one vocabulary, for ASCII texts and for texts that NFC may change."""

    counts: Sequence[ByteCount]
    counts_if_composed: Sequence[ByteCount]

    def least(self, text: str, enough: int) -> int:
        """Lower bound on the text's number of tokens; not refined once it exceeds `enough`."""
        counts = self.counts if text.isascii() else self.counts_if_composed
        return max((count.least(text, enough) for count in counts), default=0)


def compile_bound(tokenizer: Tokenizer) -> TokenBound | None:
    """The bound of a pipeline; None when the pipeline is unknown or may drop text."""
    normalizers = _steps(tokenizer.normalizer, "normalizers")
    splitters = _steps(tokenizer.pre_tokenizer, "pretokenizers")
    if not isinstance(tokenizer.model, models.BPE):
        return None
    if not all(map(_keeps_text, splitters)) or not all(map(_is_known, normalizers)):
        return None
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    missing: frozenset[int] = frozenset()
    if any(step["type"] == "ByteLevel" for step in (*normalizers, *splitters)):
        missing = frozenset(byte for char, byte in BYTE_BY_CHAR.items() if char not in vocab)
        pieces = [token_bytes(token) for token in vocab]
    elif all(f"<0x{byte:02X}>" in vocab for byte in range(256)) and tokenizer.model.byte_fallback:
        pieces = [token.encode() for token in vocab]
    else:
        return None
    pieces.extend(_added_tokens(tokenizer))
    letters = _counts(pieces, _ALL_BYTES - _LETTERS | missing)
    every = _counts(pieces, missing)
    if any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values()):
        # A token with lstrip or rstrip also consumes any amount of white space beside it.
        every = []
    if all(step["type"] != "NFC" for step in normalizers):
        return TokenBound([*every, *letters], [*every, *letters])
    # NFC may compose an ASCII letter and its accent into a non-ASCII character.
    composed = [ByteCount(count.others, _MOST_NFC_SHORTENS * count.most) for count in every]
    return TokenBound([*every, *letters], composed if missing <= _NOT_IN_UTF8 else [])


def _steps(part: Any, name: str) -> list[Mapping[str, Any]]:
    """The steps of a normalizer or pre-tokenizer in tokenizer.json, with sequences flattened."""
    if part is None:
        return []
    step = json.loads(part.__getstate__())
    return list(step[name]) if step["type"] == "Sequence" else [step]


def _keeps_text(splitter: Mapping[str, Any]) -> bool:
    kind = splitter["type"]
    return kind in {"ByteLevel", "Metaspace", "Digits"} or (
        kind == "Split" and splitter["behavior"] != "Removed"
    )


def _is_known(normalizer: Mapping[str, Any]) -> bool:
    """Whether the normalizer never shortens a text, or is NFC."""
    if normalizer["type"] != "Replace":
        return normalizer["type"] in {"NFC", "Prepend", "ByteLevel"}
    pattern = normalizer["pattern"].get("String", "").encode()
    is_longer = len(normalizer["content"].encode()) >= len(pattern)
    return bool(pattern) and is_longer and not _LETTERS & set(pattern)


def _counts(pieces: Sequence[bytes], others: frozenset[int]) -> list[ByteCount]:
    """The count of all bytes except some; none when no token has a counted byte."""
    uncounted = bytes(sorted(others))
    most = max(len(piece.translate(None, uncounted)) for piece in pieces)
    return [ByteCount(uncounted, most)] if most else []


def _added_tokens(tokenizer: Tokenizer) -> Iterator[bytes]:
    """The text of added tokens; normalized tokens are matched in the normalized text."""
    for token in tokenizer.get_added_tokens_decoder().values():
        yield token.content.encode()
        if tokenizer.normalizer is not None and token.normalized:
            yield tokenizer.normalizer.normalize_str(token.content).encode()
