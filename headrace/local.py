"""Headrace on one machine: router, scheduler and gpuworkers as child processes.

Starts them in the order in which they find each other, waits until a model answers, and stops
them in reverse. When this process ends in whatever way, so do they.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from headrace.client import ChannelConfig, HeadraceClient, ServiceError
from headrace.service import progress
from headrace.service.children import tied_to_us
from headrace.service.private_dir import private_dir
from headrace.status.embedded import EmbeddedStore, EmbeddedStoreError

T = TypeVar("T")
Tell = Callable[[str], None]

_POLL_S = 0.1
_NUM_LAST_LINES = 15
_MAX_LINE_BYTES = 1 << 20
_LAST_WORDS_S = 1.0
# Beyond a service's drain: to close its streams, flush its store and export its traces.
_STOP_SLACK_S = 8.0


class LocalError(RuntimeError):
    """A service did not start or ended by itself; the message has the last lines of its log.

    summary is the message without these lines, for callers that have shown the log already.
    """

    def __init__(self, summary: str, last_lines: Sequence[str] = ()) -> None:
        words = "".join(f"\n  {line}" for line in last_lines)
        super().__init__(f"{summary}; its last lines:{words}" if words else summary)
        self.summary = summary
        self.last_lines = tuple(last_lines)


def _programs() -> dict[str, tuple[str, ...]]:
    # -P: a file router.py in the current folder must not be imported instead of the package.
    return {
        name: (sys.executable, "-P", "-m", name) for name in ("gpuworker", "scheduler", "router")
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """What to run.

    store_url None starts an embedded store, which keeps its records in data_dir if that is given;
    "" is no store. shared_flags go to all services. channel is for asking the router whether it is
    ready; with None the router is not asked, because it wants a client certificate.
    """

    model_path: Path
    model_name: str
    listen: str = "127.0.0.1:0"
    num_workers: int = 1
    store_url: str | None = None
    data_dir: Path | None = None
    drain_timeout_s: float = 5.0
    channel: ChannelConfig | None = field(default_factory=ChannelConfig)
    shared_flags: Sequence[str] = ()
    worker_flags: Sequence[str] = ()
    scheduler_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    programs: Mapping[str, Sequence[str]] = field(default_factory=_programs)


class Child:
    """One service process. Its log goes to `log`, what it reports of its progress to `tell`."""

    def __init__(self, name: str, tell: Tell, log: Tell) -> None:
        self.name = name
        self._tell = tell
        self._log = log
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Starts the process."""
        self._process = await asyncio.create_subprocess_exec(
            *tied_to_us(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(environment),
            # Ctrl-C goes to this process alone, which stops callers before callees.
            start_new_session=True,
            limit=_MAX_LINE_BYTES,
        )
        self._reading = asyncio.create_task(self._read(self._process))

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
        assert self._process is not None, "started"
        code = await self._process.wait()
        await self._read_out()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"
        return LocalError(f"{self.name} {how}", self._last_lines)

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


class LocalPool:
    """The running services. `address` is the router's; `children` are in order of start."""

    def __init__(self, address: str, children: Sequence[Child]) -> None:
        self.address = address
        self.children = children

    async def wait_failed(self) -> LocalError:
        """Returns when a service ends by itself, with the reason."""
        return await _first_end(self.children)


@contextlib.asynccontextmanager
async def local_pool(
    config: LocalConfig, *, tell: Tell = lambda _: None, log: Tell = lambda _: None
) -> AsyncIterator[LocalPool]:
    """Starts everything, yields when a model answers, stops everything.

    Args:
        config: what to run.
        tell: called with what is being waited for.
        log: called with each log line of each service.

    Raises:
        LocalError: a service does not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        start = _Start(config, stack.enter_context(private_dir()), stack, tell, log)
        address = await start.everything()
        yield LocalPool(address, start.children)


class _Start:
    """Starts services one by one and hands their end to the exit stack."""

    def __init__(
        self,
        config: LocalConfig,
        folder: Path,
        stack: contextlib.AsyncExitStack,
        tell: Tell,
        log: Tell,
    ) -> None:
        self._config = config
        self._folder = folder
        self._stack = stack
        self._tell = tell
        self._log = log
        self.children: list[Child] = []

    async def everything(self) -> str:
        """The router's address, once a model answers."""
        config = self._config
        store_environment = await self._store()
        many = f" on {config.num_workers} workers" if config.num_workers > 1 else ""
        self._tell(f"loading {config.model_name}{many}")
        # The workers first, all at once: they take longest.
        model = ("--model", str(config.model_path), "--model-name", config.model_name)
        workers = [
            await self._service(
                "gpuworker",
                f"gpuworker-{i}" if config.num_workers > 1 else "gpuworker",
                [*model, "--worker-id", f"worker-{i}", *config.worker_flags],
            )
            for i in range(config.num_workers)
        ]
        addresses = [await self._address(name) for name in workers]
        to_workers = [flag for address in addresses for flag in ("--worker", address)]
        await self._service(
            "scheduler",
            "scheduler",
            ["--scheduler-id", "scheduler-0", *to_workers, *config.scheduler_flags],
            store_environment,
        )
        scheduler = await self._address("scheduler")
        await self._service(
            "router",
            "router",
            ["--router-id", "router-0", "--scheduler", scheduler, *model, *config.router_flags],
            store_environment,
            listen=config.listen,
        )
        address = await self._address("router")
        await self._unless_one_ends(self._until_ready(address))
        return address

    async def _store(self) -> dict[str, str]:
        """Starts a store if one is wanted; the environment that tells services its URL.

        Not flags: a URL can hold a password, and every user of the machine can read flags.
        """
        url = self._config.store_url
        if url is None:
            self._tell("starting the status store")
            try:
                embedded = EmbeddedStore(self._config.data_dir)
                url = (await self._stack.enter_async_context(embedded)).url
            except EmbeddedStoreError as error:
                raise LocalError(str(error)) from error
        return {"HEADRACE_SCHEDULER_STORE_URL": url, "HEADRACE_ROUTER_STORE_URL": url}

    async def _service(
        self,
        program: str,
        name: str,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        listen: str = "",
    ) -> str:
        """Starts one service, to be stopped before the services that were started earlier.

        Without `listen` the service listens on a socket in the private folder, which only
        processes of this user can reach.
        """
        config = self._config
        listen = listen or f"unix:{self._folder / name}.sock"
        child = Child(name, self._tell, self._log)
        self._stack.push_async_callback(child.stop, config.drain_timeout_s + _STOP_SLACK_S)
        command = [
            *config.programs[program],
            *("--listen", listen, "--address-file", str(self._folder / name)),
            *("--drain-timeout-s", str(config.drain_timeout_s)),
            *config.shared_flags,
            *flags,
        ]
        # The packages of the services lie beside this one, installed or not.
        beside = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), beside]))
        ours = {"PYTHONPATH": path, progress.VARIABLE: "1"}
        await child.start(command, os.environ | ours | dict(environment or {}))
        self.children.append(child)
        return name

    async def _address(self, name: str) -> str:
        """The address of a service, once it listens."""
        file = self._folder / name

        async def written() -> str:
            while not file.exists():  # noqa: ASYNC110 another process makes it
                await asyncio.sleep(_POLL_S)
            return file.read_text(encoding="utf-8")

        return await self._unless_one_ends(written())

    async def _until_ready(self, address: str) -> None:
        """Waits until all workers answer for the model."""
        config = self._config
        if config.channel is None:
            return
        async with HeadraceClient(address, config.channel) as client:
            while True:
                with contextlib.suppress(ServiceError):
                    ready = {m.name: m.num_ready_workers for m in await client.models()}
                    if ready.get(config.model_name, 0) >= config.num_workers:
                        return
                await asyncio.sleep(_POLL_S)

    async def _unless_one_ends(self, step: Awaitable[T]) -> T:
        """The step's result; LocalError when a service ends before."""
        work = asyncio.ensure_future(step)
        end = asyncio.create_task(_first_end(self.children))
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise end.result()
        finally:
            work.cancel()
            end.cancel()
            await asyncio.gather(work, end, return_exceptions=True)


async def _first_end(children: Sequence[Child]) -> LocalError:
    """The first end among the children."""
    ends = [asyncio.create_task(child.ended()) for child in children]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for end in ends:
            end.cancel()
