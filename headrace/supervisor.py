"""A service process that is started again when it dies, at the same address.

Knows nothing of what the services are to each other: headrace.local does.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.service import progress
from headrace.service.children import how_ended, tied_to_us

Tell = Callable[[str], None]

_POLL_S = 0.1
_NUM_LAST_LINES = 15
_MAX_LINE_BYTES = 1 << 20
_LAST_WORDS_S = 1.0


class LocalError(RuntimeError):
    """A service did not start or ended by itself; the message has the last lines of its log.

    summary is the message without these lines, for callers that have shown the log already.
    """

    def __init__(self, summary: str, last_lines: Sequence[str] = ()) -> None:
        words = "".join(f"\n  {line}" for line in last_lines)
        super().__init__(f"{summary}; its last lines:{words}" if words else summary)
        self.summary = summary
        self.last_lines = tuple(last_lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How a process that dies is started again.

    A process that dies max_num_deaths times, and ran for less than well_after_s each time, is
    given up.
    """

    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    well_after_s: float = 30.0
    max_num_deaths: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a child runs. The address it listens on comes back in address_file."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    listen: str
    address_file: Path


class Child:
    """One service process. Its log goes to `log`, what it reports of its progress to `tell`."""

    def __init__(self, program: Program, tell: Tell, log: Tell) -> None:
        self.name = program.name
        self._program = program
        # The port that was bound first is bound again after a restart, also where it was 0.
        self._listen = program.listen
        self._tell = tell
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._started = 0.0

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process that runs now; another one after a restart."""
        assert self._process is not None, "started"
        return self._process

    @property
    def uptime_s(self) -> float:
        """For how long the process has run."""
        return time.monotonic() - self._started

    async def start(self) -> None:
        """Starts the process; OSError where the system cannot."""
        program = self._program
        program.address_file.unlink(missing_ok=True)
        self._last_lines.clear()
        self._started = time.monotonic()
        where = ("--listen", self._listen, "--address-file", str(program.address_file))
        self._process = await asyncio.create_subprocess_exec(
            *tied_to_us([*program.command, *where]),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(program.environment),
            # Ctrl-C goes to this process alone, which stops callers before callees.
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        self._reading = asyncio.create_task(self._read(self._process))

    async def address(self) -> str:
        """Where the process listens, once it does."""
        self._listen = await content_of(self._program.address_file)
        return self._listen

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "it is a pipe"
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:  # longer than _MAX_LINE_BYTES; the line is dropped
                continue
            if not line:
                return
            text = line.decode("utf-8", errors="replace").rstrip()
            if (what := progress.said(text)) is not None:
                self._tell(what)
                continue
            self._last_lines.append(text)
            self._log(f"[{self.name}] {text}")

    async def ended(self) -> LocalError:
        """Waits until the process ends; how it ended."""
        code = await self.process.wait()
        await self._read_out()
        return LocalError(f"{self.name} {how_ended(code)}", self._last_lines)

    async def stop(self, timeout_s: float) -> None:
        """Sends SIGTERM and waits; kills the process when that takes too long."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            self._log(f"[{self.name}] does not stop, killing it")
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            # Also when cancelled while waiting: no process may be left.
            if process.returncode is None:
                process.kill()
        await self._read_out()

    async def _read_out(self) -> None:
        """Waits for the last lines, but not for a grandchild that holds the pipe open."""
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=_LAST_WORDS_S)


async def content_of(file: Path) -> str:
    """The content of a file, once another process has made it."""
    while (content := _content_if_there(file)) is None:  # noqa: ASYNC110 another process
        await asyncio.sleep(_POLL_S)
    return content


def _content_if_there(file: Path) -> str | None:
    return file.read_text(encoding="utf-8") if file.exists() else None


async def keep_running(
    child: Child, restarts: Restarts, log: Tell, until_well: Callable[[Child], Awaitable[None]]
) -> LocalError:
    """Starts a child again whenever it ends; returns when the child is given up, with the reason.

    Args:
        child: a started child.
        restarts: when to start again, and when to give up.
        log: called with each end and each return of the child.
        until_well: returns once the child does its work again.
    """
    num_deaths, backoff_s = 0, restarts.first_backoff_s
    end = await child.ended()
    while True:
        if child.uptime_s >= restarts.well_after_s:
            num_deaths, backoff_s = 0, restarts.first_backoff_s
        num_deaths += 1
        if num_deaths >= restarts.max_num_deaths:
            summary = f"{end.summary}; started {num_deaths} times, it always ended within "
            return LocalError(f"{summary}{restarts.well_after_s:g} s", end.last_lines)
        log(f"{end.summary}; starting it again")
        await asyncio.sleep(backoff_s)
        backoff_s = min(2 * backoff_s, restarts.max_backoff_s)
        end = await _run(child, log, until_well)


async def _run(
    child: Child, log: Tell, until_well: Callable[[Child], Awaitable[None]]
) -> LocalError:
    """Starts the child; returns when it has ended."""

    async def say_when_well() -> None:
        await until_well(child)
        log(f"{child.name} is back after {child.uptime_s:.1f} s")

    try:
        await child.start()
    except OSError as error:
        return LocalError(f"{child.name} cannot be started: {error}")
    saying = asyncio.create_task(say_when_well())
    try:
        return await child.ended()
    finally:
        saying.cancel()
