"""Prompts to token ids, off the event loop when they are long.

A megabyte takes about half a second. So prompts are read in lanes by their size: short ones at
once, middling ones by threads of their own, and big ones by others, which nobody else waits for.
Each lane is first come, first served, and has room for so many characters; what would be too much
is refused. Before a prompt is tokenized its caller is told how many tokens it has at least, and
may refuse it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from headrace.service.errors import exhausted, invalid
from router.request import Int32Array
from router.text.errors import ChatTemplateError
from router.text.tokenizer import ModelText

# About half a millisecond of tokenization; below it, changing threads costs more.
_MAX_INLINE_CHARS = 2_000
# About 20 ms, which is as long as one of those that are not big waits for another.
_MAX_SHORT_CHARS = 40_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text, tokenized as it is."""

    text: str
    field: ClassVar[str] = "text"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages with `role` and `content`, put through the model's template."""

    messages: Sequence[Mapping[str, str]]
    add_generation_prompt: bool
    field: ClassVar[str] = "chat.messages"

    @property
    def num_chars(self) -> int:
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are; [num_tokens]."""

    token_ids: Int32Array


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class _Lane:
    """Threads that read prompts of one size."""

    def __init__(self, name: str, num_threads: int, max_waiting_chars: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_waiting_chars = max_waiting_chars
        self.num_waiting_chars = 0

    async def run(self, num_chars: int, work: Callable[[], T]) -> T:
        """What the work gives; RESOURCE_EXHAUSTED when too much waits already."""
        if self.num_waiting_chars + num_chars > self._max_waiting_chars:
            raise exhausted("TOO_MANY_PROMPTS", "too many long prompts wait to be read", 1.0)
        self.num_waiting_chars += num_chars
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self.num_waiting_chars -= num_chars

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)


class PromptReader:
    """Owns the threads that tokenize; close it."""

    def __init__(self, *, num_threads: int = 2, max_waiting_chars: int = 32_000_000) -> None:
        """num_threads are those of each lane, max_waiting_chars what may wait in each."""
        self._short = _Lane("tokenize", num_threads, max_waiting_chars)
        self._big = _Lane("tokenize-big", num_threads, max_waiting_chars)

    @property
    def num_waiting_chars(self) -> int:
        """Of prompts that are in a lane."""
        return self._short.num_waiting_chars + self._big.num_waiting_chars

    def close(self) -> None:
        """Wait for what is being tokenized and end the threads."""
        self._short.close()
        self._big.close()

    async def read(
        self,
        model: ModelText,
        prompt: Prompt,
        check: Callable[[int], None],
        *,
        max_tokens: int,
        echo: bool,
        keep_special_tokens: bool,
    ) -> tuple[Int32Array, str]:
        """[num_tokens] ids, and the text that an echo shows ("" when there is none).

        check is called with a number that the prompt's tokens are not below, and raises if that
        is too much; above max_tokens the number is not made more exact. Raises ServiceError naming
        the field when the prompt is empty or its messages do not fit the template, and
        RESOURCE_EXHAUSTED when too much text waits already.
        """
        tokenizer = model.tokenizer

        def spell(token_ids: Int32Array) -> str:
            return tokenizer.decode(token_ids.tolist(), keep_special_tokens=keep_special_tokens)

        if isinstance(prompt, TokenPrompt):
            ids = prompt.token_ids
            check(len(ids))
            return ids, await self._run(len(ids), lambda: spell(ids)) if echo else ""

        text = prompt.text if isinstance(prompt, TextPrompt) else await self._render(model, prompt)
        check(tokenizer.least_tokens(text, max_tokens))
        # A template writes the special tokens itself.
        is_plain = isinstance(prompt, TextPrompt)

        def tokenize() -> tuple[Int32Array, str]:
            token_ids = tokenizer.encode(text, add_special_tokens=is_plain)
            if not echo:
                return token_ids, ""
            return token_ids, text if is_plain else spell(token_ids)

        token_ids, shown = await self._run(len(text), tokenize)
        if not len(token_ids):
            raise invalid(prompt.field, "gives no tokens; send a prompt that is not empty")
        return token_ids, shown

    async def _render(self, model: ModelText, prompt: ChatPrompt) -> str:
        def render() -> str:
            return model.chat_prompt(
                prompt.messages, add_generation_prompt=prompt.add_generation_prompt
            )

        try:
            if prompt.num_chars <= _MAX_INLINE_CHARS:
                return render()
            # Putting even big ones together is quick.
            return await self._short.run(prompt.num_chars, render)
        except ChatTemplateError as error:
            raise invalid(prompt.field, str(error)) from error

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= _MAX_INLINE_CHARS:
            return work()
        lane = self._short if num_chars <= _MAX_SHORT_CHARS else self._big
        return await lane.run(num_chars, work)
