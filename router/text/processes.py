"""The router's side of the child processes that do text jobs.

`TextProcesses` owns the fork server. A `TextProcess` is one child, owned by the code that started
the child, and executes one job at a time. A child that exceeds its limits, or whose client has gone
away, is killed. Starting another child takes milliseconds, because a fork has the models already.
"""

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping

import msgspec

from headrace.service.children import tied_to_us
from router.text.child import Task, fork_server
from router.text.errors import TextProcessError
from router.text.jobs import JobAnswer
from router.text.tokenizer import ModelText

_LENGTH = struct.Struct("<I")
# Wall-clock limit, a last resort for a child that hangs idle: the other limits are CPU time.
_MAX_WAIT_S = 120.0
_MAX_CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class TextProcess:
    """One child process and the router's side of its socket."""

    def __init__(self, owner: "TextProcesses", jobs: socket.socket) -> None:
        self._owner = owner
        self._jobs = jobs
        self._pid = 0

    async def call(self, task: Task) -> JobAnswer:
        """Send a task and wait for the answer; TextProcessError when the child ended instead.

        After any exception, including cancellation, the child is dead.
        """
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await _send(self._jobs, msgspec.msgpack.encode(task))
                return msgspec.msgpack.decode(await _receive(self._jobs), type=JobAnswer)
        except (OSError, EOFError) as error:  # a TimeoutError is an OSError
            self.kill()
            raise TextProcessError("the process that works on texts ended") from error
        except BaseException:
            self.kill()
            raise

    async def begin(self) -> None:
        """Wait until the child runs."""
        self._pid = msgspec.msgpack.decode(await _receive(self._jobs), type=int)

    def be_nice(self, niceness: int) -> None:
        """Lower the child's priority from now on; niceness is added to the router's own."""
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._pid, own + niceness)

    def cpu_s(self) -> float:
        """CPU time that the child has used, in seconds; 0.0 when the child is gone."""
        with contextlib.suppress(OSError):
            # The clock id that clock_getcpuclockid(3) returns for a process.
            return time.clock_gettime(~self._pid << 3 | 2)
        return 0.0

    def is_alive(self) -> bool:
        """Whether an idle child is still waiting for jobs."""
        try:
            return bool(self._jobs.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def stop(self) -> None:
        """Kill the child at once; a pending call raises TextProcessError."""
        with contextlib.suppress(OSError):
            self._jobs.shutdown(socket.SHUT_RDWR)
        self._owner.end(self._pid)

    def kill(self) -> None:
        """Kill the child, which has no pending call."""
        self.stop()
        self.close()

    def close(self) -> None:
        """Close the socket."""
        self._owner.forget(self)
        self._jobs.close()


class TextProcesses:
    """Owns the fork server; close it."""

    def __init__(self, models: Mapping[str, ModelText]) -> None:
        self._models = models
        self._pid = 0
        self._control: socket.socket | None = None
        self._children: set[TextProcess] = set()
        self._starting = asyncio.Lock()

    def fork(self) -> None:
        """Fork the fork server from this process, which must have no other threads yet.

        That fork server shares the models' memory with the router. Without this call, or after that
        fork server has ended, a new program is started and sent the models, which takes seconds for
        large models.
        """
        self._pid, self._control = fork_server(self._models)
        self._control.setblocking(False)

    async def start(self) -> TextProcess:
        """Start a child."""
        for _ in range(2):
            control = await self._fork_server()
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            process = TextProcess(self, ours)
            try:
                with theirs:
                    socket.send_fds(control, [b"fork"], [theirs.fileno()])
                async with asyncio.timeout(_MAX_WAIT_S):
                    await process.begin()
            except (OSError, EOFError):
                process.close()
                self.close()
            except BaseException:
                process.kill()
                raise
            else:
                self._children.add(process)
                return process
        raise TextProcessError("no process that works on texts could be started")

    def end(self, pid: int) -> None:
        """Kill and reap a child."""
        if self._control is not None and pid:
            try:
                self._control.send(str(pid).encode())
            except OSError:
                self.close()

    def forget(self, child: TextProcess) -> None:
        """Forget a child that has ended or is about to end."""
        self._children.discard(child)

    def close(self) -> None:
        """End the fork server and every child."""
        for child in tuple(self._children):
            child.close()
        if self._control is None:
            return
        self._control.close()
        self._control = None
        until = time.monotonic() + _MAX_CLOSE_S
        with contextlib.suppress(ChildProcessError):
            while not os.waitpid(self._pid, os.WNOHANG)[0]:
                if time.monotonic() > until:
                    os.kill(self._pid, signal.SIGKILL)
                time.sleep(0.005)

    async def _fork_server(self) -> socket.socket:
        async with self._starting:
            if self._control is None:
                self._pid, self._control = await _start_program(pickle.dumps(self._models))
            return self._control


async def _start_program(models: bytes) -> tuple[int, socket.socket]:
    """Start a fork server as a separate program and send the pickled models."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stream, their_stream = socket.socketpair()
    numbers = [theirs.fileno(), their_stream.fileno()]
    command = tied_to_us([sys.executable, "-m", "router.text.child", *map(str, numbers)])
    with theirs, their_stream:
        pid = os.posix_spawn(  # noqa: ASYNC221 it does not wait for the program
            command[0],
            command,
            os.environ,
            file_actions=[(os.POSIX_SPAWN_DUP2, number, number) for number in numbers],
        )
    control.setblocking(False)
    with stream:
        stream.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_sendall(stream, models)
        except OSError:
            logger.exception("the fork server for text processes does not start")
    return pid, control


async def _send(stream: socket.socket, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(stream, _LENGTH.pack(len(data)))
    await loop.sock_sendall(stream, data)


async def _receive(stream: socket.socket) -> bytearray:
    """Receives the next message; EOFError when the child is gone."""
    return await _read(stream, *_LENGTH.unpack(await _read(stream, _LENGTH.size)))


async def _read(stream: socket.socket, num_bytes: int) -> bytearray:
    loop = asyncio.get_running_loop()
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        if not (num_read := await loop.sock_recv_into(stream, rest)):
            raise EOFError
        rest = rest[num_read:]
    return data
