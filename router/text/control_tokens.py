"""Control tokens in chat prompts: those that the template wrote count, spelled ones are text.

A tokenizer looks for the names of its special tokens everywhere in a text, so a message that
spells `<|im_end|>` would end its own turn and could begin another one. Here a chat prompt is
tokenized with that search switched off, and each control token that the template wrote is replaced
by a stand-in: an added token whose name is a random string that no caller can know. The prompt is
still tokenized in one call, so all else is split and merged as it would be otherwise.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, models

from router.text import taint
from router.text.errors import ChatTemplateError

Int32Array = NDArray[np.int32]

# A stand-in's name: private-use characters, which no normalizer changes.
_FIRST_PRIVATE, _NUM_PRIVATE = 0xF0000, 65_534
_NAME_CHARS = 12
# A character that no vocabulary has: private use, the last but two of Unicode.
_RARE_CHAR = "\U0010fffd"


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered chat prompt and its control tokens.

    control_tokens are (position in the text, token id) of those that the template wrote, in order.
    has_spelled_tokens says that a message spells the name of one.
    """

    text: str
    control_tokens: Sequence[tuple[int, int]]
    has_spelled_tokens: bool


class ControlTokens:
    """The special tokens of one tokenizer; for use by one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # The library itself finds one that must stand alone only where no word is beside it.
        self._token_by_id: Mapping[int, AddedToken] = {
            token_id: token
            for token_id, token in added.items()
            if token.special and token.content and not token.single_word
        }
        # A text also gives the unknown token, for characters that have no token.
        self._ids_not_from_text = np.setdiff1d(
            np.fromiter(self._token_by_id, np.int32), self._encode(_RARE_CHAR)
        )
        # A tokenizer that knows nothing but the added tokens, to find them by the library's rules.
        self._finder = Tokenizer(models.BPE())
        self._finder.add_special_tokens(
            [AddedToken(added[i].content, special=True, normalized=False) for i in sorted(added)]
        )
        self._id_by_found_id = _ids_by_other_ids(
            self._finder, {i: token.content for i, token in self._token_by_id.items()}
        )
        # What a text with a name in it has in it, and few others: a quick search before the exact.
        self._beginnings = {token.content[:3] for token in self._token_by_id.values()}
        self._id_by_stand_in: dict[int, int] = {}
        self._name_by_id: dict[int, str] = {}
        self._cut_name = ""

    def locate(self, text: str, marks: str, fields: Sequence[str]) -> ChatText:
        """Finds the control tokens of a rendered prompt.

        Args:
            text: the prompt.
            marks: one mark of `router.text.taint` per character of the text.
            fields: the strings of the messages that it was rendered from.
        """
        is_spelled = any(self._find(field) for field in fields)
        # Marks get lost in rare operations only; an innocent prompt must not suffer from that.
        is_callers = f"[{taint.CALLER}{taint.UNKNOWN}]" if is_spelled else taint.CALLER
        begins = [0, *(match.end() for match in re.finditer(f"{is_callers}+", marks))]
        ends = [*(match.start() for match in re.finditer(f"{is_callers}+", marks)), len(text)]
        found = [
            (begin + position, token_id)
            for begin, end in zip(begins, ends, strict=True)
            for position, token_id in self._find(text[begin:end])
        ]
        return ChatText(text, found, is_spelled)

    def encode(self, chat: ChatText) -> Int32Array:
        """[num_tokens] ids; control tokens are those of the template alone.

        Raises ChatTemplateError when the tokenizer's model itself makes a control token of text.
        """
        ids = self._encode(chat.text)
        expected = [token_id for _, token_id in chat.control_tokens]
        is_control = np.isin(ids, self._ids_not_from_text)
        if not chat.has_spelled_tokens and ids[is_control].tolist() == [
            token_id for token_id in expected if token_id in self._ids_not_from_text
        ]:
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
            if self._has_control_tokens(ids):
                # Some models have the names in their vocabulary, too; apart they are other tokens.
                pieces[::2] = map(self._cut_apart, pieces[::2])
                ids = self._encode("".join(pieces))
        finally:
            self._tokenizer.encode_special_tokens = False
        if self._has_control_tokens(ids):
            raise ChatTemplateError(
                "they spell a control token that this model cannot have as text"
            )
        return self._without_stand_ins(ids)

    def _without_stand_ins(self, ids: Int32Array) -> Int32Array:
        """The ids with each stand-in replaced by its control token, and cuts left out."""
        ids = ids[ids != self._tokenizer.token_to_id(self._cut_name)]
        for position in np.flatnonzero(ids >= min(self._id_by_stand_in)):
            ids[position] = self._id_by_stand_in[int(ids[position])]
        return ids

    def _has_control_tokens(self, ids: Int32Array) -> bool:
        return bool(np.isin(ids, self._ids_not_from_text).any())

    def _cut_apart(self, text: str) -> str:
        """The text with a cut inside the name of each control token."""
        pieces: list[str] = []
        begin = 0
        for position, _ in self._find(text):
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
        self._id_by_stand_in = _ids_by_other_ids(self._tokenizer, self._name_by_id)

    def _find(self, text: str) -> list[tuple[int, int]]:
        """(position, token id) of each control token's name in the text."""
        if not any(beginning in text for beginning in self._beginnings):
            return []
        [found] = self._finder.encode_batch([text], add_special_tokens=False)
        return [
            (begin, self._id_by_found_id[found_id])
            for found_id, (begin, _) in zip(found.ids, found.offsets, strict=True)
            if found_id in self._id_by_found_id
        ]

    def _encode(self, text: str) -> Int32Array:
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, dtype=np.int32)


def _ids_by_other_ids(tokenizer: Tokenizer, name_by_id: Mapping[int, str]) -> dict[int, int]:
    """The ids by those that another tokenizer gives to their names."""
    found = {tokenizer.token_to_id(name): token_id for token_id, name in name_by_id.items()}
    return {other: token_id for other, token_id in found.items() if other is not None}


def _random_name() -> str:
    return "".join(
        chr(_FIRST_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(_NAME_CHARS)
    )
