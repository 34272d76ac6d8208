"""A bounded number of calls that may take as long as they like, until others wait for a place."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from headrace.service.errors import exhausted


class Crowd:
    """At most so many at once; while others wait, the oldest leave.

    Newcomers are not refused: whoever fills the places keeps nobody out for longer than
    patience_s, which each may stay while others wait.
    """

    def __init__(self, max_num: int, patience_s: float = 0.0) -> None:
        self._max_num = max_num
        self._patience_s = patience_s
        # Oldest first; the time at which each came in.
        self._inside: dict[asyncio.Timeout, float] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._num_places = max_num

    def __len__(self) -> int:
        return self._max_num - self._num_places

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place for the block; RESOURCE_EXHAUSTED in it when it must leave."""
        await self._enter()
        try:
            async with asyncio.timeout(None) as scope:
                self._inside[scope] = asyncio.get_running_loop().time()
                self._hurry()
                try:
                    yield
                finally:
                    del self._inside[scope]
        except TimeoutError:
            raise exhausted(
                "TOO_MANY_CALLS", "too many calls like this one are open", 1.0
            ) from None
        finally:
            self._leave()

    async def _enter(self) -> None:
        if self._num_places:
            self._num_places -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._hurry()
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._hurry()
            else:
                self._leave()
            raise

    def _leave(self) -> None:
        """Gives the place to the one that has waited longest."""
        if self._waiting:
            self._waiting.popleft().set_result(None)
        else:
            self._num_places += 1

    def _hurry(self) -> None:
        """As many of the oldest as there are others waiting may stay for patience_s only."""
        for position, (scope, since) in enumerate(self._inside.items()):
            if not scope.expired():
                is_in_the_way = position < len(self._waiting)
                scope.reschedule(since + self._patience_s if is_in_the_way else None)
