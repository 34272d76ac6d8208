"""A bounded number of calls that anybody may make and leave open."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.service.errors import exhausted


class Crowd:
    """At most so many at once: the oldest leaves when there is no room for another.

    Newcomers are not refused, so that nobody who fills it keeps others out.
    """

    def __init__(self, max_num: int) -> None:
        self._max_num = max_num
        self._scopes: dict[asyncio.Timeout, None] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for the block; RESOURCE_EXHAUSTED in it when it is the oldest and must leave."""
        if len(self._scopes) >= self._max_num:
            oldest = next(iter(self._scopes))
            del self._scopes[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(None) as scope:
                self._scopes[scope] = None
                try:
                    yield
                finally:
                    self._scopes.pop(scope, None)
        except TimeoutError:
            raise exhausted("TOO_MANY_CALLS", "too many calls like this one are open") from None
