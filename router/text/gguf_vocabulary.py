"""The vocabulary in a GGUF file's header, every value checked before it is used."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from router.text.errors import UnsupportedTokenizerError

# Kinds in tokenizer.ggml.token_type.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# Deriving a sentencepiece vocabulary's merges takes time quadratic in a token's length. Real
# tokens have fewer than 200 characters, real vocabularies fewer than 3 million in all.
_MAX_TOKEN_CHARS = 1_000
_MAX_CHARS = 1 << 24

_Id = Annotated[int, Meta(ge=0)] | None


def _key(name: str, default: Any) -> Any:
    return msgspec.field(name=f"tokenizer.ggml.{name}", default=default)


class GgufVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer part of a header; fields are named after GGUF's keys."""

    model: str | None = _key("model", None)
    pre: str = _key("pre", "gpt-2")
    tokens: tuple[Annotated[str, Meta(max_length=_MAX_TOKEN_CHARS)], ...] = _key("tokens", ())
    token_type: tuple[int, ...] | None = _key("token_type", None)
    scores: tuple[float, ...] | None = _key("scores", None)
    merges: tuple[Annotated[str, Meta(pattern="^.+ .+$")], ...] = _key("merges", ())
    bos_token_id: _Id = _key("bos_token_id", None)
    eos_token_id: _Id = _key("eos_token_id", None)
    unknown_token_id: _Id = _key("unknown_token_id", None)
    padding_token_id: _Id = _key("padding_token_id", None)
    add_bos_token: bool = _key("add_bos_token", False)
    add_space_prefix: bool = _key("add_space_prefix", True)
    chat_template: str | None = msgspec.field(name="tokenizer.chat_template", default=None)

    @property
    def kinds(self) -> Sequence[int]:
        """Each token's kind."""
        return (NORMAL,) * len(self.tokens) if self.token_type is None else self.token_type

    def token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self.tokens[token_id]

    def special_tokens(self) -> dict[str, str]:
        """Special tokens for chat templates: name (bos_token, ...) -> the token's text."""
        found = {
            "bos_token": self.token(self.bos_token_id),
            "eos_token": self.token(self.eos_token_id),
            "unk_token": self.token(self.unknown_token_id),
            "pad_token": self.token(self.padding_token_id),
        }
        return {name: token for name, token in found.items() if token is not None}


def read_vocabulary(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """Reads the vocabulary from a header's key-value pairs.

    Raises UnsupportedTokenizerError with the key and value of an invalid pair.
    """
    try:
        vocabulary = msgspec.convert(metadata, GgufVocabulary, strict=True)
    except msgspec.ValidationError as error:
        raise UnsupportedTokenizerError(f"the header's tokenizer is damaged: {error}") from error
    num_tokens = len(vocabulary.tokens)
    num_chars = sum(map(len, vocabulary.tokens))
    if num_chars > _MAX_CHARS:
        _refuse("tokens", f"has {num_chars} characters; at most {_MAX_CHARS} are read")
    for name in ("token_type", "scores"):
        values = getattr(vocabulary, name)
        if values is not None and len(values) != num_tokens:
            _refuse(name, f"has {len(values)} values for {num_tokens} tokens")
    for name in ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id"):
        token_id = getattr(vocabulary, name)
        if token_id is not None and token_id >= num_tokens:
            _refuse(name, f"is {token_id}; there are {num_tokens} tokens")
    if not all(map(math.isfinite, vocabulary.scores or ())):
        _refuse("scores", "has a value that is no finite number")
    return vocabulary


def _refuse(name: str, fault: str) -> None:
    raise UnsupportedTokenizerError(f"tokenizer.ggml.{name} {fault}")
