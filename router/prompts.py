"""Prompts to token ids, within limits on time and memory, and off the event loop.

A short text is tokenized at once, in the router's own process, if the model's tokenizer and chat
template are known to take time linear in the text's length. All other texts go to child processes.
A child is killed when the CPU time or memory allowed for the text's size is exceeded, or when the
client goes away (`router.lanes`).
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from headrace.service.errors import internal, invalid
from router.lanes import Lanes, task_of
from router.request import Int32Array
from router.text.control_tokens import ChatText
from router.text.errors import ChatTemplateError, TextProcessError
from router.text.jobs import (
    Done,
    Encode,
    EncodeBadWords,
    EncodeChat,
    Job,
    JobAnswer,
    JobFailed,
    Prepare,
    Refused,
    Render,
    Spell,
    perform,
)
from router.text.memory import Trimmer
from router.text.processes import TextProcesses
from router.text.tokenizer import ModelText

logger = logging.getLogger(__name__)

# About half a millisecond of tokenization; for less, using another process costs more.
_MAX_INLINE_CHARS = 2_000
# A message counts as this many characters more than its text.
_CHARS_PER_MESSAGE = 50
_CHARS_PER_WORD = 10
# Memory freed after a larger prompt is returned to the system.
_BIG_CHARS = 400_000


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenized as it is."""

    text: str
    field: ClassVar[str] = "text"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, rendered with the model's template."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool
    field: ClassVar[str] = "chat.messages"

    @property
    def num_chars(self) -> int:
        return sum(
            _CHARS_PER_MESSAGE + sum(map(len, message.values())) for message in self.messages
        )


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are; [num_tokens]."""

    token_ids: Int32Array


CheckedPrompt = TextPrompt | ChatPrompt | TokenPrompt


class PromptReader:
    """Owns the child processes that render and tokenize; close it."""

    def __init__(
        self,
        models: Mapping[str, ModelText],
        *,
        num_processes: int = 2,
        max_waiting_chars: int = 32_000_000,
        has_spelled_control_tokens: bool = False,
    ) -> None:
        """num_processes and max_waiting_chars (the limit on waiting text) apply to each lane.

        has_spelled_control_tokens lets messages spell control tokens.
        """
        self._models = models
        self._lanes = Lanes(TextProcesses(models), num_processes, max_waiting_chars)
        self._trimmer = Trimmer()
        self._has_spelled_control_tokens = has_spelled_control_tokens

    @property
    def num_waiting_chars(self) -> int:
        """Characters of all texts in the lanes, waiting or being processed."""
        return self._lanes.num_waiting_chars

    def fork(self) -> None:
        """Fork the children's fork server from this process, which must have no threads yet."""
        self._lanes.processes.fork()

    def close(self) -> None:
        """End all children."""
        self._trimmer.close()
        self._lanes.processes.close()

    async def start(self) -> None:
        """Start a child and compile the chat templates; ChatTemplateError when one is broken."""
        for name, model in self._models.items():
            if model.chat_template is None:
                continue
            answer = await self._answer(
                Prepare(model=name), 0, is_known=model.chat_template.is_known
            )
            if not isinstance(answer, Done):
                raise ChatTemplateError(answer.message)

    async def read(
        self,
        model: str,
        prompt: CheckedPrompt,
        check: Callable[[int], None],
        max_tokens: Callable[[], int],
        *,
        echo: bool,
        keep_special_tokens: bool,
    ) -> tuple[Int32Array, str]:
        """[num_tokens] ids, and the prompt's text for `echo` ("" when there is none).

        check is called with lower bounds on the number of tokens before anything costs CPU, and
        again when messages are rendered; check raises when the request cannot be admitted. Above
        max_tokens the bound is not refined. Raises ServiceError naming the field when the prompt is
        empty or its messages do not fit the template, RESOURCE_EXHAUSTED when too much text is
        waiting, and INTERNAL when the model's tokenizer fails.
        """
        try:
            if isinstance(prompt, TokenPrompt):
                token_ids = prompt.token_ids
            else:
                check(1)
                token_ids = await self._tokenized(model, prompt, check, max_tokens)
            if not echo:
                return token_ids, ""
            if isinstance(prompt, TextPrompt):
                return token_ids, prompt.text
            check(len(token_ids))
            data = token_ids.astype(np.int32).tobytes()
            job = Spell(model=model, token_ids=data, keep_special_tokens=keep_special_tokens)
            return token_ids, await self._do(job, len(token_ids), is_known=True)
        finally:
            if _num_chars(prompt) > _BIG_CHARS:
                self._trimmer.soon()

    async def _tokenized(
        self,
        model: str,
        prompt: TextPrompt | ChatPrompt,
        check: Callable[[int], None],
        max_tokens: Callable[[], int],
    ) -> Int32Array:
        tokenizer = self._models[model].tokenizer
        job: Encode | EncodeChat
        if isinstance(prompt, TextPrompt):
            text = prompt.text
            job = Encode(model=model, text=text, add_special_tokens=True)
        else:
            chat = await self._render(model, prompt)
            text = chat.text
            # The template writes the special tokens, so the tokenizer must add none.
            job = (
                Encode(model=model, text=text, add_special_tokens=False)
                if self._has_spelled_control_tokens
                else EncodeChat(model=model, chat=chat)
            )
        check(tokenizer.least_tokens(text, max_tokens()))
        data = await self._do(job, len(text), is_known=tokenizer.is_known)
        token_ids = np.frombuffer(data, np.int32)
        if not len(token_ids):
            raise invalid(prompt.field, "gives no tokens; send a prompt that is not empty")
        return token_ids

    async def bad_words(self, model: str, words: Sequence[str]) -> list[list[list[int]]]:
        """The token sequences that spell each word; raises the same errors as `read`."""
        job = EncodeBadWords(model=model, words=words)
        # Each word is tokenized in three spellings.
        num_chars = 3 * sum(_CHARS_PER_WORD + len(word) for word in words)
        is_known = self._models[model].tokenizer.is_known
        return msgspec.convert(await self._do(job, num_chars, is_known), list[list[list[int]]])

    async def _render(self, model: str, prompt: ChatPrompt) -> ChatText:
        template = self._models[model].chat_template
        is_known = template is None or template.is_known
        job = Render(
            model=model,
            messages=prompt.messages,
            add_generation_prompt=prompt.add_generation_prompt,
        )
        return msgspec.convert(await self._do(job, prompt.num_chars, is_known), ChatText)

    async def _do(self, job: Job, num_chars: int, is_known: bool) -> Any:
        """The job's result; raises a ServiceError when the job fails."""
        answer = await self._answer(job, num_chars, is_known=is_known)
        if isinstance(answer, Done):
            return answer.value
        if isinstance(answer, Refused):
            raise invalid(ChatPrompt.field, answer.message)
        logger.error("%s of %s: %s", type(job).__name__, job.model, answer.message)
        raise internal("TOKENIZER_FAILED", "the model's tokenizer failed; see the router's log")

    async def _answer(self, job: Job, num_chars: int, *, is_known: bool) -> JobAnswer:
        """The job's answer, from this process or a child.

        A template that exceeds the limits is the caller's error, a tokenizer that does is ours.
        """
        if is_known and num_chars <= _MAX_INLINE_CHARS:
            return perform(job, self._models)
        try:
            return await self._lanes.run(job, num_chars)
        except TextProcessError:
            task = task_of(job, num_chars)
            message = (
                f"takes more than {task.cpu_s:.1f} s of processor time or "
                f"{task.memory_bytes >> 20} MiB of memory"
            )
            if isinstance(job, Render | Prepare):
                return Refused(f"the chat template {message}")
            return JobFailed(message)


def _num_chars(prompt: CheckedPrompt) -> int:
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt():
            return prompt.num_chars
        case TokenPrompt(token_ids):
            return len(token_ids)
