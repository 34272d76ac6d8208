"""What waits to be sent to one router.

Pushing never blocks: while a message is being written, later updates are merged into the next
message, so a slow router gets fewer and larger messages and holds up no other router. What may
wait is bounded; beyond the bound the router is given up.
"""

import asyncio

from scheduler.updates import RouterUpdate, merge


class OutboxClosedError(Exception):
    """The outbox is closed, and everything in it was taken."""


class RouterOutbox:
    """The updates of one router, in order. Any number of tasks push, one takes."""

    def __init__(self, max_waiting_tokens: int) -> None:
        self._max_waiting_tokens = max_waiting_tokens
        self._updates: list[RouterUpdate] = []
        self._num_waiting_tokens = 0
        self._overflowed = asyncio.Event()
        self._is_closed = False
        self._filled = asyncio.Event()

    def push(self, update: RouterUpdate) -> None:
        """Add an update."""
        if self._overflowed.is_set():
            return
        # An id to abort is as good as a token.
        self._num_waiting_tokens += len(update.token_ids) + len(update.aborts)
        self._updates.append(update)
        if self._num_waiting_tokens > self._max_waiting_tokens:
            self._overflowed.set()
            self._updates.clear()
        self._filled.set()

    def close(self) -> None:
        """Nothing more will be pushed."""
        self._is_closed = True
        self._filled.set()

    async def wait_overflow(self) -> None:
        """Return once more tokens waited than may; what waited was dropped, later pushes are too.

        The task that takes may be stuck in sending, so another task has to wait for this.
        """
        await self._overflowed.wait()

    async def take(self) -> RouterUpdate:
        """All that waits, merged; waits until there is something.

        Raises:
            OutboxClosedError: the outbox is closed and empty.
        """
        await self._filled.wait()
        if self._is_closed and not self._updates:
            raise OutboxClosedError
        if not self._is_closed:
            self._filled.clear()
        update = merge(self._updates) if self._updates else RouterUpdate()
        self._updates = []
        self._num_waiting_tokens = 0
        return update
