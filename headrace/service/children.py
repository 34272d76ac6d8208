"""Starts child processes that the kernel ends when this process ends, even by SIGKILL."""

import os
import signal
import sys
from collections.abc import Sequence

# Runs in the child before the program, so that the child is never without the tie. A `preexec_fn`
# would run Python between fork and exec while threads of gRPC hold locks.
_TIE = """
import ctypes, os, sys
parent, number, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ctypes.CDLL(None).prctl(1, number)
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execvp(program[0], program)
"""


def tied_to_us(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """A command that runs `command` and is ended by the kernel when this process ends.

    On Linux the child gets signal `number` when the thread that started it ends
    (PR_SET_PDEATHSIG), so start it from a thread that lives as long as the process. On other
    systems the command is returned unchanged.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), str(int(number)), *command]


def how_ended(code: int) -> str:
    """How a process with this return code ended, for a sentence that begins with its name."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended ({code})"
