"""Child processes that execute text jobs and may be killed at any time.

The router starts one fork server, which has the models loaded and runs no threads. The fork server
forks a child for each socket that the router sends. The child executes the jobs that arrive on its
socket, one at a time, within the CPU time and memory allowed for each job. The kernel kills a child
that exceeds its limits, whatever code runs in the child.

`fork_server` forks the calling process into a fork server. `python -m router.text.child` is a fork
server that receives the pickled models first, for a router that already has threads.
"""

import contextlib
import os
import pickle
import resource
import signal
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import msgspec

from headrace.service.process import die_with_parent
from router.text.errors import ChatTemplateError
from router.text.jobs import Job, perform
from router.text.tokenizer import ModelText

_LENGTH = struct.Struct("<I")
_COMPILE_CPU_S = 10.0


class Task(msgspec.Struct, frozen=True):
    """A job and its limits on CPU time and memory."""

    job: Job
    cpu_s: float
    memory_bytes: int


def serve_forks(control: socket.socket, models: Mapping[str, ModelText]) -> None:
    """Fork a child for each socket received, and kill the child for each process id received.

    Ends with all children when the router closes its side of the control socket.
    """
    _outlive_signals()
    _compile_templates(models)
    pids: set[int] = set()
    # A process id can be reused only after the child is reaped, which also removes the id here.
    signal.signal(signal.SIGCHLD, lambda *_: _reap(pids))
    while True:
        message, sockets, _, _ = socket.recv_fds(control, 16, 1)
        if sockets:
            # A child that ends at once must not be reaped before its process id is among ours.
            with socket.socket(fileno=sockets[0]) as jobs, _held_back(signal.SIGCHLD):
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


@contextlib.contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Deliver this signal afterwards."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _compile_templates(models: Mapping[str, ModelText]) -> None:
    """Compile each template once, for all children; the job `Prepare` reports the errors."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, _COMPILE_CPU_S)
    for model in models.values():
        if model.chat_template is not None:
            with contextlib.suppress(ChatTemplateError):
                model.chat_template.compile()
    signal.setitimer(signal.ITIMER_PROF, 0)


def fork_server(models: Mapping[str, ModelText]) -> tuple[int, socket.socket]:
    """Fork a fork server from the calling process, which must have no other threads yet.

    Returns the fork server's process id and the router's side of its control socket.
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
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        _outlive_signals()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["RUST_BACKTRACE"] = "0"  # a panicking tokenizer would fill the log
        _send(jobs, os.getpid())
        decoder = msgspec.msgpack.Decoder(Task)
        with jobs.makefile("rb") as stream:
            while data := _receive(stream):
                task = decoder.decode(data)
                with _limited(task):
                    answer = perform(task.job, models)
                _send(jobs, answer)


@contextlib.contextmanager
def _limited(task: Task) -> Iterator[None]:
    """The kernel ends this process when the task's CPU time or memory is exceeded."""
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
    """Ignore Ctrl-C and SIGTERM sent to the process group; the router ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)


@contextlib.contextmanager
def _exit_at_end() -> Iterator[None]:
    """Exit a forked process without running its parent's clean-up."""
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


def _receive(stream: BinaryIO) -> bytes:
    """Receives the next message; empty when the router is gone."""
    header = stream.read(_LENGTH.size)
    num_bytes = _LENGTH.unpack(header)[0] if len(header) == _LENGTH.size else 0
    data = stream.read(num_bytes)
    return data if len(data) == num_bytes else b""


def main() -> None:
    """Run a fork server on a control socket; the models come first, from another socket."""
    control, models = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    with control:
        with models, models.makefile("rb") as stream:
            model_by_name = pickle.load(stream)  # noqa: S301 the router sent it
        serve_forks(control, model_by_name)


if __name__ == "__main__":
    main()
