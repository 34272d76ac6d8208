"""Prompts to token ids, within limits on time and memory, and off the event loop.

A short text is tokenized at once, in the router's own process, if the model's tokenizer and chat
template are known to take a time in proportion to the text. All else is done by child processes,
which are killed when they exceed the processor time or memory allowed for the text's size, or when
the caller goes away. Children work in lanes: to render and to tokenize, short texts, which take
milliseconds, and big ones. Each lane is first come, first served, and has room for so many
characters; a text beyond that is refused. A short text that takes long leaves its lane to others.
"""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import numpy as np

from headrace.service.errors import ServiceError, exhausted, internal, invalid
from router.request import Int32Array
from router.text.child import Task
from router.text.control_tokens import ChatText
from router.text.errors import ChatTemplateError, TextProcessError
from router.text.jobs import (
    Answer,
    Done,
    Encode,
    EncodeBadWords,
    EncodeChat,
    Job,
    JobFailed,
    Prepare,
    Refused,
    Render,
    Spell,
    perform,
)
from router.text.memory import Trimmer
from router.text.processes import TextProcess, TextProcesses
from router.text.tokenizer import ModelText

logger = logging.getLogger(__name__)

# About half a millisecond of tokenization; below it, another process costs more.
_MAX_INLINE_CHARS = 2_000
# About 20 ms, which is as long as one of those that are not big waits for another.
_MAX_SHORT_CHARS = 40_000
# A message counts as this many characters besides its own.
_CHARS_PER_MESSAGE = 50
_CHARS_PER_WORD = 10
# A child that read a bigger text is not used again.
_MAX_REUSE_CHARS = 400_000
# A short job that takes more processor time than this leaves its lane to others, and so many may.
_RENDER_SLOT_CPU_S, _SLOT_CPU_S = 0.01, 0.1
_MAX_OVERTIME = 4
# Children leave the processor to the router and the worker, and long jobs to short ones.
_NICENESS, _BIG_NICENESS, _OVERTIME_NICENESS = 5, 10, 19

# Ten times what the slowest machine needs.
_CPU_S, _CPU_S_PER_CHAR, _RENDER_CPU_S_PER_CHAR = 1.0, 10e-6, 1e-6
_MEMORY_BYTES, _MEMORY_BYTES_PER_CHAR = 128 << 20, 256


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
        return sum(
            _CHARS_PER_MESSAGE + sum(map(len, message.values())) for message in self.messages
        )


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids, used as they are; [num_tokens]."""

    token_ids: Int32Array


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class _Lane:
    """Child processes for texts of one size."""

    def __init__(
        self,
        processes: TextProcesses,
        num_slots: int,
        max_waiting_chars: int,
        *,
        slot_cpu_s: float,
        niceness: int,
    ) -> None:
        """A job that takes more processor time leaves its slot to the next job and goes on.

        niceness is the children's, beyond the router's own.
        """
        self._processes = processes
        self._slots = asyncio.Semaphore(num_slots)
        self._idle: list[TextProcess] = []
        self._max_waiting_chars = max_waiting_chars
        self._slot_cpu_s = slot_cpu_s
        self._niceness = niceness
        # Those that have left their slots, the longest first.
        self._overtime: dict[_Slot, TextProcess] = {}
        self.num_waiting_chars = 0

    async def run(self, job: Job, num_chars: int) -> Answer:
        """The job's answer; RESOURCE_EXHAUSTED when too much waits already.

        Raises TextProcessError when the job exceeds its limits.
        """
        if self.num_waiting_chars + num_chars > self._max_waiting_chars:
            raise _too_many()
        self.num_waiting_chars += num_chars
        try:
            await self._slots.acquire()
            slot = _Slot(self._slots)
            try:
                process = self._take_idle() or await self._start()
                with self._watched(process, slot):
                    answer = await process.call(_task(job, num_chars))
            except TextProcessError as error:
                if slot.is_taken_away:
                    raise _too_many() from error
                raise
            finally:
                slot.leave()
        finally:
            self.num_waiting_chars -= num_chars
        if num_chars > _MAX_REUSE_CHARS or slot.is_overtime:
            # A process gives back what a big text took only by ending, and its niceness never.
            process.kill()
        else:
            self._idle.append(process)
        return answer

    def _take_idle(self) -> TextProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive():
                return process
            process.kill()
        return None

    async def _start(self) -> TextProcess:
        process = await self._processes.start()
        process.be_nice(self._niceness)
        return process

    @contextlib.contextmanager
    def _watched(self, process: TextProcess, slot: "_Slot") -> Iterator[None]:
        """Watch over a job: of too many that overrun their slots, the longest are ended."""
        loop = asyncio.get_running_loop()
        begin = process.cpu_s()
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            if process.cpu_s() - begin < self._slot_cpu_s:
                timers.append(loop.call_later(self._slot_cpu_s, look))
                return
            if len(self._overtime) == _MAX_OVERTIME:
                # The one that has run for longest, as this may be the first that is harmless.
                longest, of_longest = next(iter(self._overtime.items()))
                longest.is_taken_away = True
                of_longest.stop()
                del self._overtime[longest]
            slot.is_overtime = True
            self._overtime[slot] = process
            process.be_nice(_OVERTIME_NICENESS)
            slot.leave()

        timers.append(loop.call_later(self._slot_cpu_s, look))
        try:
            yield
        finally:
            timers.pop().cancel()
            self._overtime.pop(slot, None)


class _Slot:
    """A place in a lane, held until it is left."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._is_held = True
        self.is_overtime = False
        self.is_taken_away = False

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots.release()


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
        """num_processes are those of each lane, max_waiting_chars what may wait in each.

        has_spelled_control_tokens lets messages spell control tokens.
        """
        self._models = models
        self._processes = TextProcesses(models)
        lane = functools.partial(_Lane, self._processes, num_processes, max_waiting_chars)
        self._render_lane = lane(slot_cpu_s=_RENDER_SLOT_CPU_S, niceness=_NICENESS)
        self._short = lane(slot_cpu_s=_SLOT_CPU_S, niceness=_NICENESS)
        self._big_render = lane(slot_cpu_s=math.inf, niceness=_BIG_NICENESS)
        self._big = lane(slot_cpu_s=math.inf, niceness=_BIG_NICENESS)
        self._trimmer = Trimmer()
        self._has_spelled_control_tokens = has_spelled_control_tokens

    @property
    def num_waiting_chars(self) -> int:
        """Of texts that are in a lane."""
        lanes = (self._render_lane, self._short, self._big_render, self._big)
        return sum(lane.num_waiting_chars for lane in lanes)

    def fork(self) -> None:
        """Make the children's fork server out of this process, which must have no threads yet."""
        self._processes.fork()

    def close(self) -> None:
        """End all children."""
        self._trimmer.close()
        self._processes.close()

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
        prompt: Prompt,
        check: Callable[[int], None],
        *,
        max_tokens: int,
        echo: bool,
        keep_special_tokens: bool,
    ) -> tuple[Int32Array, str]:
        """[num_tokens] ids, and the text that an echo shows ("" when there is none).

        check is called with lower bounds on the number of tokens, before any work and again when
        the text is known, and raises when the request cannot be let in. Above max_tokens the bound
        is not made more exact. Raises ServiceError naming the field when the prompt is empty
        or its messages do not fit the template, RESOURCE_EXHAUSTED when too much text waits
        already, and INTERNAL when the model's tokenizer fails.
        """
        try:
            check(1)
            return await self._read(
                model, prompt, check, max_tokens, echo=echo, keep_special_tokens=keep_special_tokens
            )
        finally:
            if _num_chars(prompt) > _MAX_REUSE_CHARS:
                self._trimmer.soon()

    async def _read(
        self,
        model: str,
        prompt: Prompt,
        check: Callable[[int], None],
        max_tokens: int,
        *,
        echo: bool,
        keep_special_tokens: bool,
    ) -> tuple[Int32Array, str]:
        tokenizer = self._models[model].tokenizer

        async def spell(token_ids: Int32Array) -> str:
            data = token_ids.astype(np.int32).tobytes()
            job = Spell(model=model, token_ids=data, keep_special_tokens=keep_special_tokens)
            return str(await self._do(job, len(token_ids), is_known=True))

        if isinstance(prompt, TokenPrompt):
            check(len(prompt.token_ids))
            return prompt.token_ids, await spell(prompt.token_ids) if echo else ""

        job: Encode | EncodeChat
        if isinstance(prompt, TextPrompt):
            text = prompt.text
            job = Encode(model=model, text=text, add_special_tokens=True)
        else:
            chat = await self._render(model, prompt)
            text = chat.text
            # The template writes the special tokens itself.
            job = (
                Encode(model=model, text=text, add_special_tokens=False)
                if self._has_spelled_control_tokens
                else EncodeChat(model=model, chat=chat)
            )
        check(tokenizer.least_tokens(text, max_tokens))
        data = await self._do(job, len(text), is_known=tokenizer.is_known)
        token_ids = np.frombuffer(data, np.int32)
        if not len(token_ids):
            raise invalid(prompt.field, "gives no tokens; send a prompt that is not empty")
        if not echo:
            return token_ids, ""
        return token_ids, text if isinstance(prompt, TextPrompt) else await spell(token_ids)

    async def bad_words(self, model: str, words: Sequence[str]) -> list[list[list[int]]]:
        """For each word, the token sequences that spell it; errors as those of `read`."""
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
        """What the job gives, or the ServiceError that says why it does not."""
        answer = await self._answer(job, num_chars, is_known=is_known)
        if isinstance(answer, Done):
            return answer.value
        if isinstance(answer, Refused):
            raise invalid(ChatPrompt.field, answer.message)
        logger.error("%s of %s: %s", type(job).__name__, job.model, answer.message)
        raise internal("TOKENIZER_FAILED", "the model's tokenizer failed; see the router's log")

    async def _answer(self, job: Job, num_chars: int, *, is_known: bool) -> Answer:
        """The answer of this process or of a child, in which a template is the caller's affair."""
        if is_known and num_chars <= _MAX_INLINE_CHARS:
            return perform(job, self._models)
        is_short = num_chars <= _MAX_SHORT_CHARS
        if isinstance(job, Render | Prepare):
            lane = self._render_lane if is_short else self._big_render
        else:
            lane = self._short if is_short else self._big
        try:
            return await lane.run(job, num_chars)
        except TextProcessError:
            task = _task(job, num_chars)
            message = (
                f"takes more than {task.cpu_s:.1f} s of processor time or "
                f"{task.memory_bytes >> 20} MiB of memory"
            )
            if isinstance(job, Render | Prepare):
                return Refused(f"the chat template {message}")
            return JobFailed(message)


def _num_chars(prompt: Prompt) -> int:
    match prompt:
        case TextPrompt(text):
            return len(text)
        case ChatPrompt():
            return prompt.num_chars
        case TokenPrompt(token_ids):
            return len(token_ids)


def _too_many() -> ServiceError:
    return exhausted("TOO_MANY_PROMPTS", "too many long prompts wait to be read", 1.0)


def _task(job: Job, num_chars: int) -> Task:
    """The job with what it may take, at the size of its text."""
    is_render = isinstance(job, Render)
    return Task(
        job,
        cpu_s=_CPU_S + (_RENDER_CPU_S_PER_CHAR if is_render else _CPU_S_PER_CHAR) * num_chars,
        memory_bytes=_MEMORY_BYTES + _MEMORY_BYTES_PER_CHAR * num_chars,
    )
