"""Starts a program so that it cannot outlive this process, even one that is killed."""

import os
import signal
import sys
from collections.abc import Sequence

# Runs before the program itself does, so there is no moment without the tie; a `preexec_fn` would
# run Python between fork and exec while gRPC's threads hold locks.
_TIE = """
import ctypes, os, sys
parent, number, program = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
ctypes.CDLL(None).prctl(1, number)
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execvp(program[0], program)
"""


def tied_to_us(command: Sequence[str], number: signal.Signals = signal.SIGKILL) -> list[str]:
    """The command, to be started by this very process; the kernel ends it when we end.

    On Linux the child gets signal `number` at our death (PR_SET_PDEATHSIG), whatever killed us;
    elsewhere the command is returned as it is. Start it from a thread that lives as long as the
    process: the tie is to the thread.
    """
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), str(int(number)), *command]
