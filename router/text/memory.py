"""Gives memory back to the system that the C library keeps after big prompts."""

import asyncio
import ctypes
import sys

_DELAY_S = 1.0


class Trimmer:
    """Trims the heap of this process some time after the last big prompt."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(library, "malloc_trim", None)

    def soon(self) -> None:
        """A big prompt has been read; its call, and what that holds, is about to end."""
        self.close()
        if self._trim is not None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._trim, 0)

    def close(self) -> None:
        """Trim no more."""
        if self._timer is not None:
            self._timer.cancel()
