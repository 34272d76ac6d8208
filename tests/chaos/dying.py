"""`python -m tests.chaos.dying FILE SERVICE ...`: a service that kills itself at a chosen moment.

The moment is named in FILE, and chosen by writing FILE; the first process that comes to it removes
FILE and dies, as by SIGKILL.
"""

import functools
import importlib
import inspect
import os
import runpy
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Moment:
    """Before or after a call of `path` in a module of a service."""

    module: str
    path: str
    is_after: bool = False

    @property
    def service(self) -> str:
        return self.module.partition(".")[0]


MOMENTS = {
    "admitted, not dispatched": Moment("router.dispatcher", "Dispatcher.enqueue", is_after=True),
    "dispatched, not recorded": Moment("router.status_log", "StatusLog.dispatched"),
    "dispatched, not acknowledged": Moment("scheduler.connection", "RouterConnection.submit"),
    "acknowledged, not run": Moment("scheduler.request_log", "RequestLog.submitted", is_after=True),
    "a request was admitted": Moment("scheduler.request_log", "RequestLog.admitted"),
    "tokens leave the scheduler": Moment("scheduler.switchboard", "Switchboard.publish"),
    "tokens left the scheduler": Moment("scheduler.switchboard", "Switchboard.publish", True),
    "tokens reach the router": Moment("router.arrivals", "Arrivals.take"),
    "tokens reached the router": Moment("router.arrivals", "Arrivals.take", is_after=True),
    "finishing in the scheduler": Moment("scheduler.request_log", "RequestLog.finished"),
    "finished in the scheduler": Moment("scheduler.request_log", "RequestLog.finished", True),
    "finishing in the router": Moment("router.live", "LiveRequests._finish"),
    "finished in the router": Moment("router.live", "LiveRequests._finish", is_after=True),
    "aborting in the router": Moment("router.aborts", "Aborts.end"),
    "aborted in the router": Moment("router.aborts", "Aborts.end", is_after=True),
    "aborting in the scheduler": Moment("scheduler.rpc.service", "SchedulerService.Abort"),
    "aborted in the scheduler": Moment("scheduler.rpc.service", "SchedulerService.Abort", True),
    "resuming, not claimed": Moment("router.take_up", "TakeUps.claim"),
    "resuming, claimed": Moment("router.take_up", "TakeUps.claim", is_after=True),
    "taken over in the scheduler": Moment("scheduler.request_log", "RequestLog.taken_over", True),
    "recovering": Moment("router.recovery", "Recovery._recover"),
    "recovered": Moment("router.recovery", "Recovery._recover", is_after=True),
}


def _install(name: str, moment: Moment, file: Path) -> None:
    """Wraps the call of a moment."""
    module = importlib.import_module(moment.module)
    owner, _, method = moment.path.rpartition(".")
    holder = getattr(module, owner)
    setattr(holder, method, _wrapped(getattr(holder, method), name, moment, file))


def _wrapped(call: Callable[..., Any], name: str, moment: Moment, file: Path) -> Any:
    @functools.wraps(call)
    async def around_async(*given: Any, **named: Any) -> Any:
        if not moment.is_after:
            _die_if_chosen(name, file)
        result = await call(*given, **named)
        _die_if_chosen(name, file)
        return result

    @functools.wraps(call)
    def around(*given: Any, **named: Any) -> Any:
        if not moment.is_after:
            _die_if_chosen(name, file)
        result = call(*given, **named)
        _die_if_chosen(name, file)
        return result

    return around_async if inspect.iscoroutinefunction(call) else around


def _die_if_chosen(name: str, file: Path) -> None:
    try:
        is_chosen = file.read_text() == name
        if is_chosen:
            file.unlink()
    except FileNotFoundError:
        return
    if is_chosen:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    where, service, *arguments = sys.argv[1:]
    for each, at in MOMENTS.items():
        if at.service == service:
            _install(each, at, Path(where))
    sys.argv = [service, *arguments]
    runpy.run_module(service, run_name="__main__", alter_sys=True)
