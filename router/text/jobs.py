"""Text jobs (render, tokenize, detokenize) as messages that another process can execute.

A job is executed in the process that calls `perform`: the router's own, or a child
(`router.text.child`). The answer is a message too: `Done`, or an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from router.text.bad_words import bad_word_sequences
from router.text.control_tokens import ChatText
from router.text.errors import ChatTemplateError
from router.text.tokenizer import ModelText

_MAX_MESSAGE_CHARS = 1_000


class _Job(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    model: str


class Prepare(_Job, frozen=True, tag=True):
    """Compile the chat template; the result is None."""

    def run(self, model: ModelText) -> None:
        if model.chat_template is not None:
            model.chat_template.compile()


class Render(_Job, frozen=True, tag=True):
    """Render messages with the chat template; the result is a ChatText."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool

    def run(self, model: ModelText) -> ChatText:
        return model.chat_prompt(self.messages, add_generation_prompt=self.add_generation_prompt)


class Encode(_Job, frozen=True, tag=True):
    """Tokenize a text, in which names of special tokens become these tokens; gives int32 bytes."""

    text: str
    add_special_tokens: bool

    def run(self, model: ModelText) -> bytes:
        ids = model.tokenizer.encode(self.text, add_special_tokens=self.add_special_tokens)
        return ids.tobytes()


class EncodeChat(_Job, frozen=True, tag=True):
    """Tokenize a chat prompt; the result is int32 bytes."""

    chat: ChatText

    def run(self, model: ModelText) -> bytes:
        return model.tokenizer.control_tokens.encode(self.chat).tobytes()


class Spell(_Job, frozen=True, tag=True):
    """Detokenize token ids (int32 bytes)."""

    token_ids: bytes
    keep_special_tokens: bool

    def run(self, model: ModelText) -> str:
        ids = np.frombuffer(self.token_ids, np.int32).tolist()
        return model.tokenizer.decode(ids, keep_special_tokens=self.keep_special_tokens)


class EncodeBadWords(_Job, frozen=True, tag=True):
    """Find the token sequences that spell each word."""

    words: Sequence[str]

    def run(self, model: ModelText) -> list[list[list[int]]]:
        return [bad_word_sequences(word, model.tokenizer) for word in self.words]


Job = Prepare | Render | Encode | EncodeChat | Spell | EncodeBadWords


class Done(msgspec.Struct, frozen=True, tag=True):
    """The job's result."""

    value: Any


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The caller's messages do not fit the model's template."""

    message: str


class JobFailed(msgspec.Struct, frozen=True, tag=True):
    """The template or the tokenizer failed unexpectedly."""

    message: str


JobAnswer = Done | Refused | JobFailed


def perform(job: Job, models: Mapping[str, ModelText]) -> JobAnswer:
    """Execute a job; raises only exceptions that end the process or cancel the task."""
    try:
        return Done(job.run(models[job.model]))
    except ChatTemplateError as error:
        return Refused(_clean(str(error)))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 a panic in the tokenizers library is no Exception
        return JobFailed(_clean(f"{type(error).__name__}: {error}"))


def _clean(message: str) -> str:
    """The error's message, truncated, and without lone surrogates, which cannot be sent."""
    return message[:_MAX_MESSAGE_CHARS].encode(errors="replace").decode()
