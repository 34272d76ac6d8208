"""Assigns text jobs to child processes, in lanes by size, each first come, first served.

Four lanes ensure that short texts, which take milliseconds, do not wait for large texts. Each lane
has a few children and a limit on waiting characters; a text beyond the limit is refused. A job on a
short text that overruns frees its slot for the next job and continues at low priority. When too
many jobs have overrun, the job that has run longest is killed.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import Iterator

from headrace.service.errors import ServiceError, exhausted
from router.text.child import Task
from router.text.errors import TextProcessError
from router.text.jobs import Job, JobAnswer, Prepare, Render
from router.text.processes import TextProcess, TextProcesses

# About 20 ms of tokenization: the longest that one short text may delay another.
_MAX_SHORT_CHARS = 40_000
# A child that processed a larger text is not reused.
_MAX_REUSE_CHARS = 400_000
# A short job that takes more CPU time than this frees its slot; at most this many such jobs run.
_RENDER_SLOT_CPU_S, _SLOT_CPU_S = 0.01, 0.1
_MAX_OVERTIME = 4
# Niceness: children yield the CPU to the router and the worker, and long jobs to short jobs.
_NICENESS, _BIG_NICENESS, _OVERTIME_NICENESS = 5, 10, 19

# Ten times the need of the slowest machine.
_CPU_S, _CPU_S_PER_CHAR, _RENDER_CPU_S_PER_CHAR = 1.0, 10e-6, 1e-6
_MEMORY_BYTES, _MEMORY_BYTES_PER_CHAR = 128 << 20, 256


class Lanes:
    """The lanes of one router; its owner closes the processes."""

    def __init__(self, processes: TextProcesses, num_slots: int, max_waiting_chars: int) -> None:
        """num_slots (children) and max_waiting_chars are limits of each lane."""
        self.processes = processes
        lane = functools.partial(Lane, processes, num_slots, max_waiting_chars)
        self.short_render = lane(slot_cpu_s=_RENDER_SLOT_CPU_S, niceness=_NICENESS)
        self.short = lane(slot_cpu_s=_SLOT_CPU_S, niceness=_NICENESS)
        self.big_render = lane(slot_cpu_s=math.inf, niceness=_BIG_NICENESS)
        self.big = lane(slot_cpu_s=math.inf, niceness=_BIG_NICENESS)

    @property
    def num_waiting_chars(self) -> int:
        """Characters of all texts in the lanes, waiting or being processed."""
        lanes = (self.short_render, self.short, self.big_render, self.big)
        return sum(lane.num_waiting_chars for lane in lanes)

    async def run(self, job: Job, num_chars: int) -> JobAnswer:
        """The job's answer from a child of the lane for its size; raises as `Lane.run` does."""
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
        """A job that exceeds the slot's CPU time frees its slot and continues.

        niceness of the children is added to the router's own.
        """
        self._processes = processes
        self._slots = asyncio.Semaphore(num_slots)
        self._idle: list[TextProcess] = []
        self._max_waiting_chars = max_waiting_chars
        self._slot_cpu_s = slot_cpu_s
        self._niceness = niceness
        # Jobs that have overrun and freed their slots, the longest-running first.
        self._overtime: dict[_Slot, TextProcess] = {}
        self.num_waiting_chars = 0

    async def run(self, job: Job, num_chars: int) -> JobAnswer:
        """The job's answer; RESOURCE_EXHAUSTED when too much text is waiting.

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
                if slot.is_killed:
                    raise _too_many() from error
                raise
            finally:
                slot.leave()
        finally:
            self.num_waiting_chars -= num_chars
        if num_chars > _MAX_REUSE_CHARS or slot.is_overtime:
            # A process frees a large text's memory only by ending, and cannot lower its niceness.
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
        """Watch a job for overrun: beyond the limit, the longest-running overrun job is killed."""
        loop = asyncio.get_running_loop()
        begin = process.cpu_s()
        timers: list[asyncio.TimerHandle] = []

        def look() -> None:
            if process.cpu_s() - begin < self._slot_cpu_s:
                timers.append(loop.call_later(self._slot_cpu_s, look))
                return
            if len(self._overtime) == _MAX_OVERTIME:
                # The longest-running job is killed, because the newest overrun may be harmless.
                longest, of_longest = next(iter(self._overtime.items()))
                longest.is_killed = True
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
    """A job's slot in a lane; is_killed: the lane killed the job to make room for another job."""

    def __init__(self, slots: asyncio.Semaphore) -> None:
        self._slots = slots
        self._is_held = True
        self.is_overtime = False
        self.is_killed = False

    def leave(self) -> None:
        if self._is_held:
            self._is_held = False
            self._slots.release()


def _too_many() -> ServiceError:
    return exhausted("TOO_MANY_PROMPTS", "too many long prompts wait to be read", 1.0)


def task_of(job: Job, num_chars: int) -> Task:
    """The job with the limits for its text's size."""
    is_render = isinstance(job, Render)
    return Task(
        job,
        cpu_s=_CPU_S + (_RENDER_CPU_S_PER_CHAR if is_render else _CPU_S_PER_CHAR) * num_chars,
        memory_bytes=_MEMORY_BYTES + _MEMORY_BYTES_PER_CHAR * num_chars,
    )
