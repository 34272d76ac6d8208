"""Who may write next, so that a busy router sends fewer, larger messages.

A step has news for hundreds of streams. Woken all at once, they would all write before the next
step is read; and written for every step, messages would take all the time there is. So streams
are woken in rounds: in a round each has one turn, a few in each turn of the event loop. When one
that had its turn waits for another before the round is over, steps come faster than they can be
written: then there is a rest of REST times the round's length, at most MAX_REST_S, and what comes
meanwhile joins a stream's next message. A router that keeps up never rests; one that does not
spends a third of its time on writing, and keeps up with reading.
"""

import asyncio
from collections import deque
from typing import Protocol

REST = 2.0
MAX_REST_S = 0.02


class Sleeper(Protocol):
    """A stream that waits for its turn; last_round is the waker's."""

    last_round: int

    def deliver(self) -> None:
        """It is its turn."""
        ...


class Waker:
    """Owns the order of those that wait for their turn."""

    def __init__(self, *, batch: int = 8) -> None:
        """batch is how many are woken in one turn of the event loop."""
        self._batch = batch
        self._round: deque[Sleeper] = deque()
        self._next: deque[Sleeper] = deque()
        self._is_scheduled = False
        self._is_behind = False
        self._round_number = 0
        self._began = 0.0

    def add(self, sleeper: Sleeper) -> None:
        """Give it a turn in the next round."""
        self._next.append(sleeper)
        if sleeper.last_round == self._round_number:
            self._is_behind = True
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._round_number += 1
        self._is_behind = False
        self._round, self._next = self._next, self._round
        self._go_on()

    def _go_on(self) -> None:
        try:
            for _ in range(min(self._batch, len(self._round))):
                sleeper = self._round.popleft()
                sleeper.last_round = self._round_number
                sleeper.deliver()
        finally:
            # Scheduled last, so that the streams just woken write first; and scheduled even if
            # `deliver` raised, because no stream is woken again once the rounds stop.
            asyncio.get_running_loop().call_soon(self._go_on if self._round else self._end)

    def _end(self) -> None:
        loop = asyncio.get_running_loop()
        if self._is_behind:
            rest_s = min(MAX_REST_S, REST * (loop.time() - self._began))
            loop.call_later(rest_s, self._begin)
        elif self._next:
            loop.call_soon(self._begin)
        else:
            self._is_scheduled = False
