"""Returns freed memory, which the C library keeps after large prompts, to the system."""

import asyncio
import ctypes
import sys

_DELAY_S = 1.0


class Trimmer:
    """Trims the heap of this process some time after the last large prompt."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        library = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(library, "malloc_trim", None)

    def soon(self) -> None:
        """Schedule a trim after a large prompt, whose call is about to end and free its memory."""
        self.close()
        if self._trim is not None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._trim, 0)

    def close(self) -> None:
        """Cancel any scheduled trim."""
        if self._timer is not None:
            self._timer.cancel()
