"""A model's tokenizer and chat template, from a Hugging Face folder or a GGUF file."""

import contextlib
import functools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from headrace.service.gguf_header import GgufError, read_gguf_header
from router.text.chat import ChatTemplate
from router.text.control_tokens import ChatText, ControlTokens, Int32Array
from router.text.detokenizer import Detokenizer, compile_decoder
from router.text.errors import ChatTemplateError, UnsupportedTokenizerError
from router.text.gguf_tokenizer import KNOWN_PATTERNS, build_gguf_tokenizer
from router.text.gguf_vocabulary import read_vocabulary
from router.text.token_bound import compile_bound

# Child processes are forked, so the tokenizers library must start no threads here.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

_MAX_FILE_BYTES = 1 << 28
# Unused ids cost memory too; real vocabularies have a few thousand of them.
_MAX_UNUSED_IDS = 1 << 20

_SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class TextTokenizer:
    """Text to token ids and back; encode from one thread at a time.

    is_known: the tokenizer uses only known regular expressions, whose matching time is linear in
    the text's length. An unknown expression may never finish, even on a short text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises UnsupportedTokenizerError when the detokenizer could not be exact."""
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        id_by_token = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(id_by_token.values(), default=-1) + 1
        if self.vocab_size > _MAX_UNUSED_IDS + len(id_by_token):
            token = max(id_by_token, key=id_by_token.__getitem__)
            raise UnsupportedTokenizerError(
                f"token {token[:50]!r} has the id {id_by_token[token]}, and there are only "
                f"{len(id_by_token)} tokens"
            )
        tokens: list[str | None] = [None] * self.vocab_size
        for token, token_id in id_by_token.items():
            tokens[token_id] = token
        added = tokenizer.get_added_tokens_decoder()
        special = {token.content: i for i, token in added.items() if token.special}
        self.special_id_by_token: Mapping[str, int] = special
        self.special_ids = frozenset(special.values())
        self._decoding = compile_decoder(_decoder_of(tokenizer), tokens, self.special_ids)
        self._bound = compile_bound(tokenizer)
        self.is_known = all(
            pattern in KNOWN_PATTERNS
            for part in (tokenizer.normalizer, tokenizer.pre_tokenizer)
            if part is not None
            for pattern in _patterns(json.loads(part.__getstate__()))
        )

    @functools.cached_property
    def control_tokens(self) -> ControlTokens:
        """The special tokens, and how chat prompts are tokenized."""
        return ControlTokens(self._tokenizer)

    def __reduce__(self) -> Any:
        """Pickled as tokenizer.json, which takes a second for a large vocabulary."""
        return TextTokenizer, (self._tokenizer,)

    def encode(self, text: str, *, add_special_tokens: bool) -> Int32Array:
        """[num_tokens] ids. Names of special tokens in the text become those tokens."""
        # Unlike `encode`, this call computes no offsets, which saves time and memory.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return np.asarray(encoding.ids, dtype=np.int32)

    def least_tokens(self, text: str, enough: int) -> int:
        """Lower bound on the text's number of tokens, computed in milliseconds.

        Above `enough` the bound is not refined.
        """
        return 0 if self._bound is None else self._bound.least(text, enough)

    def decode(self, token_ids: Sequence[int], *, keep_special_tokens: bool = False) -> str:
        """The text of a whole sequence."""
        stream = self.detokenizer((), keep_special_tokens=keep_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def detokenizer(
        self, prompt_token_ids: Sequence[int], *, keep_special_tokens: bool = False
    ) -> Detokenizer:
        """A stream that continues the prompt; only the prompt's end matters."""
        return self._decoding.start(prompt_token_ids, keep_special_tokens=keep_special_tokens)


@dataclass(frozen=True, slots=True)
class ModelText:
    """The tokenizer and chat template of a model."""

    tokenizer: TextTokenizer
    chat_template: ChatTemplate | None

    def chat_prompt(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool
    ) -> ChatText:
        """Renders the prompt of a conversation; ChatTemplateError when rendering fails."""
        if self.chat_template is None:
            raise ChatTemplateError("this model has no chat template; send `text` instead")
        text, marks = self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt
        )
        fields = [field for message in messages for field in message.values()]
        return self.tokenizer.control_tokens.locate(text, marks, fields)


def load_model_text(path: Path) -> ModelText:
    """Loads tokenizer and chat template from a Hugging Face folder or a GGUF file.

    Raises UnsupportedTokenizerError, which names the file and its fault.
    """
    with faults_named(path):
        return _load_folder(path) if path.is_dir() else _load_gguf(path)


@contextlib.contextmanager
def faults_named(path: Path) -> Iterator[None]:
    """Turns a fault of a model's files into an UnsupportedTokenizerError that names the path."""
    try:
        yield
    except UnsupportedTokenizerError as error:
        raise UnsupportedTokenizerError(f"{path}: {error}") from error
    except (OSError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the library, on some files, is not an Exception
        raise UnsupportedTokenizerError(
            f"{path}: its tokenizer cannot be read: {type(error).__name__}: {error}"
        ) from error


def _load_gguf(file: Path) -> ModelText:
    try:
        metadata = read_gguf_header(file, with_strings=True).metadata
    except GgufError as error:
        raise UnsupportedTokenizerError(
            f"{error}; give a folder with tokenizer.json, or a GGUF file"
        ) from error
    vocabulary = read_vocabulary(metadata)
    source = vocabulary.chat_template
    template = ChatTemplate(source, vocabulary.special_tokens()) if source else None
    return ModelText(TextTokenizer(build_gguf_tokenizer(vocabulary)), template)


def _patterns(step: Any) -> Iterator[str]:
    """Every regular expression of a normalizer or pre-tokenizer in tokenizer.json."""
    for key, value in step.items() if isinstance(step, dict) else enumerate(step):
        if key == "Regex":
            yield value
        elif isinstance(value, (dict, list)):
            yield from _patterns(value)


def _decoder_of(tokenizer: Tokenizer) -> Any:
    """The decoder in tokenizer.json's format; serializing the whole pipeline takes a second."""
    decoder = tokenizer.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _load_folder(folder: Path) -> ModelText:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedTokenizerError(
            "there is no tokenizer.json; convert the tokenizer to the `tokenizers` format"
        )
    _check_size(file)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises no more specific class
        raise UnsupportedTokenizerError(f"tokenizer.json cannot be read: {error}") from error
    config = _read_json(folder / "tokenizer_config.json")
    special = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
    source = _template_source(folder, config.get("chat_template"))
    template = ChatTemplate(source, special) if source else None
    return ModelText(TextTokenizer(tokenizer), template)


def _check_size(file: Path) -> None:
    if (num_bytes := file.stat().st_size) > _MAX_FILE_BYTES:
        raise UnsupportedTokenizerError(
            f"{file.name} has {num_bytes} bytes; at most {_MAX_FILE_BYTES} are read"
        )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    _check_size(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UnsupportedTokenizerError(f"{file.name} is not JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; the file gives each as a string or as an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _template_source(folder: Path, in_config: Any) -> str | None:
    """From chat_template.jinja, else the configuration: a string, or several by name."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        _check_size(file)
        return file.read_text(encoding="utf-8")
    for entry in in_config if isinstance(in_config, list) else ():
        if isinstance(entry, dict) and entry.get("name") == "default":
            in_config = entry.get("template")
    return in_config if isinstance(in_config, str) else None
