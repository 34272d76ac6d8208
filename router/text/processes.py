"""The router's side of the child processes that do text jobs.

`TextProcesses` owns the fork server; a `TextProcess` is one child, owned by whoever started it,
and does one job at a time. A child that exceeds its limits, or whose caller has gone, is killed;
starting the next one takes milliseconds, because it is a fork that has the models already.
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping

import msgspec

from headrace.service.children import tied_to_us
from router.text.child import ModelParts, Task, fork_server
from router.text.errors import TextProcessError
from router.text.jobs import Answer
from router.text.tokenizer import ModelText

_LENGTH = struct.Struct("<I")
# Last resort for a child that neither works nor ends; limits are in processor time.
_MAX_WAIT_S = 120.0
_MAX_CLOSE_S = 5.0

logger = logging.getLogger(__name__)


class TextProcess:
    """One child process and our side of its socket."""

    def __init__(self, owner: "TextProcesses", jobs: socket.socket) -> None:
        self._owner = owner
        self._jobs = jobs
        self._pid = 0

    async def call(self, task: Task) -> Answer:
        """Have a task done; TextProcessError when the child ended instead.

        Whatever is raised, cancellation too, the child is dead by then.
        """
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await _send(self._jobs, msgspec.msgpack.encode(task))
                return msgspec.msgpack.decode(await _receive(self._jobs), type=Answer)
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
        """Leave the processor to others from now on; niceness is beyond the router's own."""
        with contextlib.suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self._pid, own + niceness)

    def cpu_s(self) -> float:
        """Processor time that the child has used, in seconds; 0.0 when it is gone."""
        with contextlib.suppress(OSError):
            # What clock_getcpuclockid(3) gives for a process.
            return time.clock_gettime(~self._pid << 3 | 2)
        return 0.0

    def is_alive(self) -> bool:
        """Whether an idle child still waits for jobs."""
        try:
            return bool(self._jobs.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def stop(self) -> None:
        """End the child at once; a call that waits for it raises TextProcessError."""
        with contextlib.suppress(OSError):
            self._jobs.shutdown(socket.SHUT_RDWR)
        self._owner.end(self._pid)

    def kill(self) -> None:
        """End the child, which no call waits for."""
        self.stop()
        self.close()

    def close(self) -> None:
        """Give the socket back."""
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
        """Make a fork server out of this very process, which must have no other threads yet.

        It shares the models' memory with us. Without this, or when that fork server has ended, one
        is started as a new program and sent the models, which takes seconds for large ones.
        """
        self._pid, self._control = fork_server(self._models)
        self._control.setblocking(False)

    async def start(self) -> TextProcess:
        """A new child."""
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
        """The child is gone, or about to go."""
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
                parts = {name: _parts(model) for name, model in self._models.items()}
                self._pid, self._control = await _start_program(msgspec.msgpack.encode(parts))
            return self._control


async def _start_program(parts: bytes) -> tuple[int, socket.socket]:
    """A fork server that is a program of its own, from the models as a message."""
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
            await _send(stream, parts)
        except OSError:
            logger.exception("the fork server for text processes does not start")
    return pid, control


async def _send(stream: socket.socket, data: bytes) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(stream, _LENGTH.pack(len(data)))
    await loop.sock_sendall(stream, data)


async def _receive(stream: socket.socket) -> bytearray:
    """The next message; EOFError when the other side is gone."""
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


def _parts(model: ModelText) -> ModelParts:
    template = model.chat_template
    return ModelParts(
        tokenizer=model.tokenizer.to_json(),
        chat_template=None if template is None else template.source,
        special_tokens={} if template is None else template.special_tokens,
    )
