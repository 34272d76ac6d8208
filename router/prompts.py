"""Prompts to token ids, off the event loop when they are long."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.service.errors import exhausted, invalid
from router.request import Int32Array
from router.text.errors import ChatTemplateError
from router.text.tokenizer import ModelText

# About half a millisecond of tokenization; below it, changing threads costs more.
_MAX_INLINE_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenized as it is."""

    text: str

    @property
    def num_chars(self) -> int:
        return len(self.text)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, put through the model's template."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool

    @property
    def num_chars(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are; [num_tokens]."""

    token_ids: Int32Array

    @property
    def num_chars(self) -> int:
        return 0


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class PromptReader:
    """Owns the threads that tokenize; close it."""

    def __init__(self, *, num_threads: int = 2, max_waiting_chars: int = 64_000_000) -> None:
        """More text than max_waiting_chars never waits for a thread: it is refused."""
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenize")
        self._max_waiting_chars = max_waiting_chars
        self._num_waiting_chars = 0

    def close(self) -> None:
        """Wait for what is being tokenized and end the threads."""
        self._executor.shutdown(wait=True)

    async def read(
        self, model: ModelText, prompt: Prompt, *, echo: bool, keep_special_tokens: bool
    ) -> tuple[Int32Array, str]:
        """[num_tokens] ids, and the text that an echo shows ("" when there is none).

        Raises ServiceError naming the field when the prompt is empty or its messages do not fit
        the template, and RESOURCE_EXHAUSTED when too much text waits already.
        """

        def read() -> tuple[Int32Array, str]:
            token_ids = _tokenize(model, prompt)
            if not echo:
                return token_ids, ""
            if isinstance(prompt, TextPrompt):
                return token_ids, prompt.text
            decode = model.tokenizer.decode
            return token_ids, decode(token_ids.tolist(), keep_special_tokens=keep_special_tokens)

        if prompt.num_chars <= _MAX_INLINE_CHARS:
            return read()
        if self._num_waiting_chars + prompt.num_chars > self._max_waiting_chars:
            raise exhausted("TOO_MANY_PROMPTS", "too many long prompts wait to be read", 1.0)
        self._num_waiting_chars += prompt.num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, read)
        finally:
            self._num_waiting_chars -= prompt.num_chars


def _tokenize(model: ModelText, prompt: Prompt) -> Int32Array:
    tokenizer = model.tokenizer
    match prompt:
        case TokenPrompt(token_ids):
            return token_ids
        case TextPrompt(text):
            field = "text"
            token_ids = tokenizer.encode(text, add_special_tokens=True)
        case ChatPrompt(messages, add_generation_prompt):
            field = "chat.messages"
            try:
                text = model.chat_prompt(messages, add_generation_prompt=add_generation_prompt)
            except ChatTemplateError as error:
                raise invalid(field, str(error)) from error
            # The template has written the special tokens itself.
            token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not len(token_ids):
        raise invalid(field, "gives no tokens; send a prompt that is not empty")
    return token_ids
