"""What a service's __main__ shares: logging, event loop, parent's death, bound address."""

import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headrace.service import logs
from headrace.service.config import help_text
from headrace.service.logs import LogFormat

_PR_SET_PDEATHSIG = 1


class ProcessConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of any service process."""

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], help_text("Least severe line to log.")
    ] = "info"
    log_format: Annotated[LogFormat, help_text("Lines for people, or one JSON object a line.")] = (
        "text"
    )
    otlp_endpoint: Annotated[
        str, help_text("OTLP/gRPC collector for traces and metrics, e.g. http://127.0.0.1:4317.")
    ] = ""
    address_file: Annotated[
        str, help_text("Write the bound host:port to this file once listening.")
    ] = ""


def run(name: str, config: ProcessConfig, main: Coroutine[Any, Any, None]) -> None:
    """Run a service to its end, on uvloop where there is one."""
    logs.setup(name, config.log_level, config.log_format)
    if os.environ.get("HEADRACE_PARENT_DEATH") == "1":
        die_with_parent()
    _allow_many_files()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main)


def keep_for_good() -> None:
    """Exempt all objects made so far from garbage collection: they live as long as the process.

    A collection that visits all modules, a tokenizer or torch stops every stream for 30 to 200 ms.
    """
    gc.collect()
    gc.freeze()


def write_address(config: ProcessConfig, address: str) -> None:
    """Write the bound address to the address file, atomically."""
    if not config.address_file:
        return
    file = Path(config.address_file)
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(address, encoding="utf-8")
    draft.replace(file)


def die_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send us this signal when our parent ends (Linux; elsewhere nothing)."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent died before the call
        os.kill(os.getpid(), number)


def _allow_many_files() -> None:
    """Raises the limit of open files, and so of connections, to the hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # macOS reports a hard limit that setrlimit does not accept.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
