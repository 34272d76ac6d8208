"""A bounded number of calls that may take as long as they like, until others come."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.service.errors import exhausted


class Crowd:
    """The oldest of max_num calls leaves when another comes, once it has been there for stay_s.

    Newcomers neither wait nor are refused, so that nobody who fills the places keeps others out;
    for up to stay_s there can be more than max_num.
    """

    def __init__(self, max_num: int, stay_s: float = 0.0) -> None:
        self._max_num = max_num
        self._stay_s = stay_s
        # Oldest first; the time at which each came.
        self._inside: dict[asyncio.Timeout, float] = {}

    def __len__(self) -> int:
        return len(self._inside)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for the block; RESOURCE_EXHAUSTED in it when it must leave."""
        now = asyncio.get_running_loop().time()
        self._make_room(now)
        try:
            async with asyncio.timeout(None) as scope:
                self._inside[scope] = now
                try:
                    yield
                finally:
                    self._inside.pop(scope, None)
        except TimeoutError:
            raise exhausted("TOO_MANY_CALLS", "too many such calls are open", 1.0) from None

    def _make_room(self, now: float) -> None:
        while len(self._inside) >= self._max_num:
            oldest, since = next(iter(self._inside.items()))
            if now - since < self._stay_s:
                return
            del self._inside[oldest]
            oldest.reschedule(now)
