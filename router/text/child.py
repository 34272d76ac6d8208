"""Child processes that do text jobs and may be killed at any time.

The router starts one fork server, which has the models loaded and runs no threads. The fork server
forks a child whenever the router sends it a socket; the child then does the jobs that come over
that socket, one at a time, within the processor time and memory that each job is given. The kernel
ends a child that takes more, without help from the code that runs in it.

`fork_server` makes a fork server out of the calling process; `python -m router.text.child` is one
that is sent the models first, for a process that has threads already.
"""

import contextlib
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from tokenizers import Tokenizer

from headrace.service.process import die_with_parent
from router.text.chat import ChatTemplate
from router.text.errors import ChatTemplateError
from router.text.jobs import Job, perform
from router.text.tokenizer import ModelText, TextTokenizer

_LENGTH = struct.Struct("<I")
_COMPILE_CPU_S = 10.0


class Task(msgspec.Struct, frozen=True):
    """A job and what it may take."""

    job: Job
    cpu_s: float
    memory_bytes: int


class ModelParts(msgspec.Struct, frozen=True):
    """A model's text side as a message; tokenizer is tokenizer.json."""

    tokenizer: str
    chat_template: str | None
    special_tokens: Mapping[str, str]


def serve_forks(control: socket.socket, models: Mapping[str, ModelText]) -> None:
    """Fork a child for each socket that comes, and kill those whose process ids come.

    Ends, and its children with it, when the router closes its side.
    """
    _outlive_signals()
    _compile_templates(models)
    pids: set[int] = set()
    # A process id is free for others only when it is reaped, and then no longer among ours.
    signal.signal(signal.SIGCHLD, lambda *_: _reap(pids))
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 16, 1)
        if sockets:
            with socket.socket(fileno=sockets[0]) as jobs:
                if not (pid := os.fork()):
                    control.close()
                    _run_child(jobs, models)
                pids.add(pid)
        elif message:
            if (pid := int(message)) in pids:
                os.kill(pid, signal.SIGKILL)
        else:
            break
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _compile_templates(models: Mapping[str, ModelText]) -> None:
    """Compile each once, for all children; the errors are for the job that asks for them."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _COMPILE_CPU_S)
    for model in models.values():
        if model.chat_template is not None:
            with contextlib.suppress(ChatTemplateError):
                model.chat_template.compile()
    signal.setitimer(signal.ITIMER_PROF, 0)


def fork_server(models: Mapping[str, ModelText]) -> tuple[int, socket.socket]:
    """Fork the calling process, which must have no other threads yet, into a fork server.

    Gives its process id and the router's side of its control socket.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not (pid := os.fork()):
        ours.close()
        with _exit_at_end():
            serve_forks(theirs, models)
    theirs.close()
    return pid, ours


def _run_child(jobs: socket.socket, models: Mapping[str, ModelText]) -> None:
    with _exit_at_end():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _outlive_signals()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["RUST_BACKTRACE"] = "0"  # a tokenizer that panics would fill the log
        _send(jobs, os.getpid())
        decoder = msgspec.msgpack.Decoder(Task)
        while data := _receive(jobs):
            task = decoder.decode(data)
            with _limited(task):
                answer = perform(task.job, models)
            _send(jobs, answer)


@contextlib.contextmanager
def _limited(task: Task) -> Iterator[None]:
    """The kernel ends this process when it has used the processor for longer."""
    if sys.platform == "linux":
        memory = _address_space_bytes() + task.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (memory, resource.RLIM_INFINITY))
    signal.setitimer(signal.ITIMER_PROF, task.cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _address_space_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123 each job reads it
        return int(file.read().split()[0]) * resource.getpagesize()


def _outlive_signals() -> None:
    """Ctrl-C and SIGTERM for the whole process group are the router's; we end with the router."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


@contextlib.contextmanager
def _exit_at_end() -> Iterator[None]:
    """Leave a forked process without the clean-up that is its parent's."""
    status = 1
    try:
        yield
        status = 0
    except (BrokenPipeError, ConnectionResetError):
        pass  # the router no longer waits for the answer
    except BaseException:  # noqa: BLE001 nothing may go on into the parent's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _reap(pids: set[int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            pids.discard(pid)


def _send(stream: socket.socket, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    stream.sendall(_LENGTH.pack(len(data)))
    stream.sendall(data)


def _receive(stream: socket.socket) -> bytes:
    """The next message; empty when the router is gone."""
    header = _read(stream, _LENGTH.size)
    return _read(stream, *_LENGTH.unpack(header)) if header else b""


def _read(stream: socket.socket, num_bytes: int) -> bytes:
    """So many bytes, or none when the router is gone."""
    data = bytearray(num_bytes)
    rest = memoryview(data)
    while rest:
        if not (num_read := stream.recv_into(rest)):
            return b""
        rest = rest[num_read:]
    return bytes(data)


def main() -> None:
    """Serve forks on the socket whose number is given; the models come first."""
    with socket.socket(fileno=int(sys.argv[1])) as control:
        with socket.socket(fileno=int(sys.argv[2])) as stream:
            parts = msgspec.msgpack.decode(_receive(stream), type=dict[str, ModelParts])
        models = {name: _model_of(part) for name, part in parts.items()}
        serve_forks(control, models)


def _model_of(parts: ModelParts) -> ModelText:
    source = parts.chat_template
    template = None if source is None else ChatTemplate(source, parts.special_tokens)
    return ModelText(TextTokenizer(Tokenizer.from_str(parts.tokenizer)), template)


if __name__ == "__main__":
    main()
