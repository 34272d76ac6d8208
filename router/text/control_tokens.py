"""Control tokens in chat prompts: only the template can write them; a caller's are plain text.

A tokenizer looks for the names of its special tokens everywhere in a text, so a message that
spells `<|im_end|>` would end its own turn and could begin another turn. Here a chat prompt is
tokenized with that search switched off, and each control token that the template wrote is replaced
by a stand-in: an added token whose name is a random string that no caller can know. The prompt is
still tokenized in one call, so all other text is split and merged as usual.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from router.text import taint
from router.text.errors import ChatTemplateError

Int32Array = NDArray[np.int32]

# The alphabet of stand-in names: private-use characters, which no normalizer changes.
_FIRST_PRIVATE, _NUM_PRIVATE = 0xF0000, 65_534
_NAME_CHARS = 12
_MAX_BEGINNING_CHARS = 8
# A private-use character that no vocabulary has, the last but two of Unicode.
_RARE_CHAR = "\U0010fffd"


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered chat prompt and its control tokens.

    control_tokens: (position in the text, token id) of each token the template wrote, in order.
    has_spelled_tokens: a message spells the name of a control token.
    """

    text: str
    control_tokens: Sequence[tuple[int, int]]
    has_spelled_tokens: bool


class ControlTokens:
    """The special tokens of one tokenizer; for use by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # The library finds a single-word token only where no word is beside its name.
        self._token_by_id: Mapping[int, AddedToken] = {
            token_id: token
            for token_id, token in added.items()
            if token.special and token.content and not token.single_word
        }
        # Plain text can give the unknown token too, for characters without a token.
        self._ids_not_from_text = np.setdiff1d(
            np.fromiter(self._token_by_id, np.int32), self._encode(_RARE_CHAR)
        )
        self._names = _Names({t.content: token_id for token_id, t in self._token_by_id.items()})
        self._id_by_stand_in: dict[int, int] = {}
        self._name_by_id: dict[int, str] = {}
        self._cut_name = ""

    def locate(self, text: str, marks: str, fields: Sequence[str]) -> ChatText:
        """Finds the control tokens of a rendered prompt.

        Args:
            text: the prompt.
            marks: one mark of `router.text.taint` per character of the text.
            fields: the strings of the messages that the prompt was rendered from.
        """
        is_spelled = any(any(self._names.find(field)) for field in fields) or (
            taint.UNKNOWN in marks and self._names.can_be_made_of(fields)
        )
        # A few operations lose the marks; a prompt that spells no token must still be accepted.
        is_callers = f"[{taint.CALLER}{taint.UNKNOWN}]" if is_spelled else taint.CALLER
        begins = [0, *(match.end() for match in re.finditer(f"{is_callers}+", marks))]
        ends = [*(match.start() for match in re.finditer(f"{is_callers}+", marks)), len(text)]
        found = [
            (begin + position, token_id)
            for begin, end in zip(begins, ends, strict=True)
            for position, token_id in self._names.find(text[begin:end])
        ]
        return ChatText(text, found, is_spelled)

    def encode(self, chat: ChatText) -> Int32Array:
        """[num_tokens] ids; all control tokens among them were written by the template.

        Raises ChatTemplateError when the tokenizer's model turns plain text into a control token.
        """
        if not chat.has_spelled_tokens:
            ids = self._encode(chat.text)
            expected = np.array([token_id for _, token_id in chat.control_tokens], np.int32)
            if np.array_equal(self._controls(ids), self._controls(expected)):
                return ids
        return self._encode_with_stand_ins(chat)

    def _encode_with_stand_ins(self, chat: ChatText) -> Int32Array:
        if not self._id_by_stand_in:
            self._add_stand_ins()
        pieces: list[str] = []
        begin = 0
        for position, token_id in chat.control_tokens:
            pieces += [chat.text[begin:position], self._name_by_id[token_id]]
            begin = position + len(self._token_by_id[token_id].content)
        pieces.append(chat.text[begin:])
        self._tokenizer.encode_special_tokens = True
        try:
            ids = self._encode("".join(pieces))
            if len(self._controls(ids)):
                # Some vocabularies also hold the names as plain tokens; a cut name avoids these.
                pieces[::2] = map(self._cut_apart, pieces[::2])
                ids = self._encode("".join(pieces))
        finally:
            self._tokenizer.encode_special_tokens = False
        if len(self._controls(ids)):
            raise ChatTemplateError(
                "they spell a control token that this model cannot have as text"
            )
        return self._without_stand_ins(ids)

    def _without_stand_ins(self, ids: Int32Array) -> Int32Array:
        """The ids with each stand-in replaced by its control token, and cut tokens removed."""
        ids = ids[ids != self._tokenizer.token_to_id(self._cut_name)]
        for position in np.flatnonzero(ids >= min(self._id_by_stand_in)):
            ids[position] = self._id_by_stand_in[int(ids[position])]
        return ids

    def _controls(self, ids: Int32Array) -> Int32Array:
        """The control tokens among the ids, in order, without the unknown token."""
        return ids[np.isin(ids, self._ids_not_from_text)]

    def _cut_apart(self, text: str) -> str:
        """The text with a cut token inserted in the name of each control token."""
        pieces: list[str] = []
        begin = 0
        for position, _ in self._names.find(text):
            pieces.append(text[begin : position + 1])
            begin = position + 1
        return self._cut_name.join([*pieces, text[begin:]])

    def _add_stand_ins(self) -> None:
        self._cut_name = _random_name()
        stand_ins = [AddedToken(self._cut_name, special=False, normalized=False)]
        for token_id, token in self._token_by_id.items():
            self._name_by_id[token_id] = _random_name()
            stand_ins.append(
                AddedToken(
                    self._name_by_id[token_id],
                    lstrip=token.lstrip,
                    rstrip=token.rstrip,
                    normalized=token.normalized,
                    special=False,
                )
            )
        self._tokenizer.add_tokens(stand_ins)
        for token_id, name in self._name_by_id.items():
            stand_in = self._tokenizer.token_to_id(name)
            assert stand_in is not None, "the stand-in was added"
            self._id_by_stand_in[stand_in] = token_id

    def _encode(self, text: str) -> Int32Array:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)


class _Names:
    """Finds the names of control tokens: the leftmost, and among these the longest."""

    def __init__(self, id_by_name: Mapping[str, int]) -> None:
        self._id_by_name = id_by_name
        # Beginning of a name -> possible lengths of the names with this beginning, longest first.
        num_chars = min(_MAX_BEGINNING_CHARS, min(map(len, id_by_name), default=0))
        lengths: dict[str, set[int]] = {}
        for name in id_by_name:
            lengths.setdefault(name[:num_chars], set()).add(len(name))
        self._lengths = {key: sorted(found, reverse=True) for key, found in lengths.items()}
        self._beginning = re.compile("|".join(map(re.escape, lengths)) or "(?!)")
        self._alphabets = {frozenset(name.casefold()) for name in id_by_name}

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """(position, token id) of each name in the text, in order."""
        end = 0
        while match := self._beginning.search(text, end):
            begin = match.start()
            end = begin + 1
            for length in self._lengths[match[0]]:
                token_id = self._id_by_name.get(text[begin : begin + length])
                if token_id is not None:
                    yield begin, token_id
                    end = begin + length
                    break

    def can_be_made_of(self, fields: Sequence[str]) -> bool:
        """Whether the fields have all characters of a name, for a template to join."""
        chars = set("".join(fields).casefold())
        return any(alphabet <= chars for alphabet in self._alphabets)


def _random_name() -> str:
    return "".join(
        chr(_FIRST_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_NAME_CHARS)
    )
