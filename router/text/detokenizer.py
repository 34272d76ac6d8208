"""Token ids to text, a few at a time, equal to decoding the whole sequence at once.

The pipeline's decoder is compiled once into a table of pieces; a stream then costs one look-up per
token. Two families of decoders are supported. Any other decoder is refused when the model is
loaded, because an approximation would garble text silently:

* byte level: a piece is bytes; a character is complete with its last byte.
* sentencepiece: a piece is text, or one byte (`<0x41>`). A run of byte pieces is text only if the
  whole run is valid UTF-8 (as in decoding at once), so a run is held until it ends.

Bytes that can never become a character give U+FFFD, as decoding at once does. A character that is
incomplete when the sequence ends is dropped, where decoding at once would give U+FFFD.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.text.errors import UnsupportedTokenizerError

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Detokenizes one stream of tokens."""

    @property
    def num_chars(self) -> int:
        """Number of whole characters so far, including held-back characters."""
        ...

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        ...

    def finish(self) -> str:
        """The text held back, released at the end of the tokens."""
        ...


class Decoding(Protocol):
    """A tokenizer's decoder, compiled; shared by all streams of a model."""

    def start(self, prompt_token_ids: Sequence[int], *, keep_special_tokens: bool) -> Detokenizer:
        """A stream of text that continues the prompt's; an empty prompt begins the text."""
        ...


def compile_decoder(
    decoder: Any, tokens: Sequence[str | None], special_ids: frozenset[int]
) -> Decoding:
    """Compiles the decoder of a pipeline.

    Args:
        decoder: the "decoder" part of tokenizer.json.
        tokens: each id's token as the vocabulary spells it; None for an unused id.
        special_ids: tokens to leave out unless a stream keeps special tokens.
    """
    steps = _flatten(decoder)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteLevel(tokens, special_ids)
    if kinds == ["Metaspace"]:
        [step] = steps
        scheme = step.get("prepend_scheme", "always")
        return _SentencePiece(
            tokens,
            special_ids,
            _Rules({step.get("replacement", "▁"): " "}, first_without=scheme != "never"),
            metaspace=step.get("replacement", "▁"),
        )
    return _SentencePiece(tokens, special_ids, _read_rules(steps, kinds))


def _flatten(decoder: Any) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


@dataclass(frozen=True, slots=True)
class _Rules:
    """How sentencepiece tokens become text.

    replacements apply to each token; strips_left is how many spaces are stripped from the text's
    beginning; first_without drops the space marks of the first token.
    """

    replacements: dict[str, str]
    has_bytes: bool = False
    strips_left: int = 0
    first_without: bool = False


def _read_rules(steps: list[dict[str, Any]], kinds: list[str]) -> _Rules:
    """Accepts Replace..., ByteFallback?, Fuse, Strip? in this order; raises for any other."""
    replacements: dict[str, str] = {}
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        step = rest.pop(0)
        replacements[step["pattern"]["String"]] = step["content"]
    has_bytes = bool(rest) and rest[0]["type"] == "ByteFallback"
    if has_bytes:
        rest.pop(0)
    is_fused = bool(rest) and rest[0]["type"] == "Fuse"
    if is_fused:
        rest.pop(0)
    strips_left = 0
    if is_fused and rest and rest[0]["type"] == "Strip" and rest[0]["stop"] == 0:
        step = rest.pop(0)
        strips_left = step["start"] if step["content"] == " " else 0
    if rest or not kinds or not (replacements or has_bytes):
        raise UnsupportedTokenizerError(
            f"decoder {' + '.join(kinds) or 'none'} is not supported; supported: ByteLevel, "
            "Metaspace, Replace + ByteFallback + Fuse + Strip"
        )
    return _Rules(replacements, has_bytes, strips_left)


def _byte_by_char() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes map to themselves, others to 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + offset): byte for offset, byte in enumerate(others)}


BYTE_BY_CHAR = _byte_by_char()


def token_bytes(token: str) -> bytes:
    """A byte-level token's bytes; a token with any other character stands for its own text."""
    try:
        return bytes([BYTE_BY_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")


class _ByteLevel:
    def __init__(self, tokens: Sequence[str | None], special_ids: frozenset[int]) -> None:
        self._pieces = [token_bytes(token) if token else b"" for token in tokens]
        self._without_special = list(self._pieces)
        for token_id in special_ids:
            self._without_special[token_id] = b""

    def start(self, prompt_token_ids: Sequence[int], *, keep_special_tokens: bool) -> Detokenizer:
        pieces = self._pieces if keep_special_tokens else self._without_special
        stream = _ByteLevelStream(pieces)
        # A prompt may end inside a character, which is at most 4 bytes long.
        stream.push([t for t in prompt_token_ids[-16:] if t < len(pieces) and pieces[t]][-4:])
        stream.num_chars = 0
        return stream


class _ByteLevelStream:
    __slots__ = ("_decoder", "_pieces", "num_chars")

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        pieces = self._pieces
        try:
            data = b"".join([pieces[token_id] for token_id in token_ids])
        except IndexError:
            # Models pad their vocabulary beyond the tokenizer's; padding ids have no text.
            data = b"".join([pieces[t] for t in token_ids if t < len(pieces)])
        text = self._decoder.decode(data)
        self.num_chars += len(text)
        return text

    def finish(self) -> str:
        return ""


class _SentencePiece:
    def __init__(
        self,
        tokens: Sequence[str | None],
        special_ids: frozenset[int],
        rules: _Rules,
        metaspace: str = "",
    ) -> None:
        self._rules = rules
        self._metaspace = metaspace
        self._tokens = tokens
        self._pieces = [None if token is None else self._piece(token) for token in tokens]
        self._without_special = list(self._pieces)
        for token_id in special_ids:
            self._without_special[token_id] = None

    def _piece(self, token: str) -> str | int:
        for old, new in self._rules.replacements.items():
            token = token.replace(old, new)
        if self._rules.has_bytes and len(token) == 6 and token[:3] == "<0x" and token[5] == ">":
            try:
                return int(token[3:5], 16)
            except ValueError:
                return token
        return token

    def first_piece(self, token_id: int, piece: str | int) -> str | int:
        """A token's piece at the very beginning of a text."""
        if isinstance(piece, str) and self._rules.first_without:
            return (self._tokens[token_id] or "").replace(self._metaspace, "")
        return piece

    def start(self, prompt_token_ids: Sequence[int], *, keep_special_tokens: bool) -> Detokenizer:
        pieces = self._pieces if keep_special_tokens else self._without_special
        stream = _SentencePieceStream(self, pieces, self._rules.strips_left)
        # Only the prompt's last run of bytes, and whether the prompt has any text, matter here.
        tail = [t for t in prompt_token_ids[-64:] if t < len(pieces) and pieces[t] is not None]
        stream.push(tail)
        stream.forget_whole_characters()
        return stream


class _SentencePieceStream:
    __slots__ = ("_decoding", "_is_first", "_num_to_strip", "_pieces", "_run", "_shown")

    def __init__(
        self, decoding: _SentencePiece, pieces: list[str | int | None], num_to_strip: int
    ) -> None:
        self._decoding = decoding
        self._pieces = pieces
        self._num_to_strip = num_to_strip
        self._is_first = True
        self._run = bytearray()
        self._shown = 0

    @property
    def num_chars(self) -> int:
        return self._shown + len(self._run.decode("utf-8", errors="ignore"))

    def forget_whole_characters(self) -> None:
        """Drop all text so far except the bytes of an incomplete character."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        decoder.decode(bytes(self._run))
        self._run = bytearray(decoder.getstate()[0])
        self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        parts: list[str] = []
        pieces = self._pieces
        for token_id in token_ids:
            piece = pieces[token_id] if token_id < len(pieces) else None
            if piece is None:
                continue
            if self._is_first:
                piece = self._decoding.first_piece(token_id, piece)
                self._is_first = False
            if isinstance(piece, int):
                self._run.append(piece)
                continue
            if self._run:
                parts.append(self._end_run())
            parts.append(piece)
        return self._show("".join(parts))

    def finish(self) -> str:
        if not self._run:
            return ""
        # An incomplete last character is dropped; an invalid run gives the text it decodes to.
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            text = decoder.decode(bytes(self._run))
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return self._show(text)

    def _end_run(self) -> str:
        try:
            text = self._run.decode("utf-8")
        except UnicodeDecodeError:
            text = _REPLACEMENT * len(self._run)
        self._run.clear()
        return text

    def _show(self, text: str) -> str:
        while self._num_to_strip and text:
            if text[0] != " ":
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        self._shown += len(text)
        return text
