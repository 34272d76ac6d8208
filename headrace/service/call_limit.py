"""Bounds the number of open calls of one kind by ending the oldest ones."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from headrace.service.errors import exhausted

T = TypeVar("T")


class CallLimit:
    """At most max_num open calls: a new call ends the oldest one that is open for stay_s or longer.

    A new call neither waits nor is refused, so that a caller who keeps many calls open keeps no
    other caller out. Calls younger than stay_s can exceed max_num.
    """

    def __init__(self, max_num: int, stay_s: float = 0.0) -> None:
        self._max_num = max_num
        self._stay_s = stay_s
        # Oldest first, with the time at which each call was opened.
        self._opened: dict[asyncio.Timeout, float] = {}

    def __len__(self) -> int:
        return len(self._opened)

    async def run(self, call: Awaitable[T]) -> T:
        """Await an open call; RESOURCE_EXHAUSTED when a newer call ends this one."""
        now = asyncio.get_running_loop().time()
        self._make_room(now)
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._opened[scope] = now
                return await call
        except TimeoutError:
            raise exhausted("TOO_MANY_CALLS", "too many such calls are open", 1.0) from None
        finally:
            self._opened.pop(scope, None)

    def _make_room(self, now: float) -> None:
        while len(self._opened) >= self._max_num:
            oldest, opened = next(iter(self._opened.items()))
            if now - opened < self._stay_s:
                return
            del self._opened[oldest]
            oldest.reschedule(now)
