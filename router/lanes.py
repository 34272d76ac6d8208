"""Who works on which text: child processes in lanes, each first come, first served.

Texts are rendered and tokenized, and short ones, which take milliseconds, do not wait for big ones:
four lanes. Each has a few children and room for so many characters; a text beyond that is refused.
A short text that takes long leaves its lane to the next one, and goes on at low priority; of too
many such texts the one that has run longest is ended.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import Iterator

from headrace.service.errors import ServiceError, exhausted
from router.text.child import Task
from router.text.errors import TextProcessError
from router.text.jobs import Answer, Job, Prepare, Render
from router.text.processes import TextProcess, TextProcesses

# About 20 ms of tokenization: as long as a short text may wait for another.
_MAX_SHORT_CHARS = 40_000
# A child that worked on a bigger text is not used again.
_MAX_REUSE_CHARS = 400_000
# A short job that takes more processor time than this leaves its lane to others, and so many may.
_RENDER_SLOT_CPU_S, _SLOT_CPU_S = 0.01, 0.1
_MAX_OVERTIME = 4
# Children leave the processor to the router and the worker, and long jobs to short ones.
_NICENESS, _BIG_NICENESS, _OVERTIME_NICENESS = 5, 10, 19

# Ten times what the slowest machine needs.
_CPU_S, _CPU_S_PER_CHAR, _RENDER_CPU_S_PER_CHAR = 1.0, 10e-6, 1e-6
_MEMORY_BYTES, _MEMORY_BYTES_PER_CHAR = 128 << 20, 256


class Lanes:
    """The lanes of one router; its owner closes the processes."""

    def __init__(self, processes: TextProcesses, num_slots: int, max_waiting_chars: int) -> None:
        """num_slots children work in each lane, max_waiting_chars may wait in each."""
        self.processes = processes
        lane = functools.partial(Lane, processes, num_slots, max_waiting_chars)
        self.short_render = lane(slot_cpu_s=_RENDER_SLOT_CPU_S, niceness=_NICENESS)
        self.short = lane(slot_cpu_s=_SLOT_CPU_S, niceness=_NICENESS)
        self.big_render = lane(slot_cpu_s=math.inf, niceness=_BIG_NICENESS)
        self.big = lane(slot_cpu_s=math.inf, niceness=_BIG_NICENESS)

    @property
    def num_waiting_chars(self) -> int:
        """Of texts that are in a lane."""
        lanes = (self.short_render, self.short, self.big_render, self.big)
        return sum(lane.num_waiting_chars for lane in lanes)

    async def run(self, job: Job, num_chars: int) -> Answer:
        """The job's answer from a child of its lane; errors as those of `Lane.run`."""
        is_short = num_chars <= _MAX_SHORT_CHARS
        if isinstance(job, Render | Prepare):
            lane = self.short_render if is_short else self.big_render
        else:
            lane = self.short if is_short else self.big
        return await lane.run(job, num_chars)


class Lane:
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
                    answer = await process.call(task_of(job, num_chars))
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


def _too_many() -> ServiceError:
    return exhausted("TOO_MANY_PROMPTS", "too many long prompts wait to be read", 1.0)


def task_of(job: Job, num_chars: int) -> Task:
    """The job with what it may take, at the size of its text."""
    is_render = isinstance(job, Render)
    return Task(
        job,
        cpu_s=_CPU_S + (_RENDER_CPU_S_PER_CHAR if is_render else _CPU_S_PER_CHAR) * num_chars,
        memory_bytes=_MEMORY_BYTES + _MEMORY_BYTES_PER_CHAR * num_chars,
    )
