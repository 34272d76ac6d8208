"""The order in which client streams write, so that a busy router sends fewer, larger messages.

A step has tokens for hundreds of streams. If all streams were woken at once, they would all write
before the next step is read, and a message for every step would take all the CPU time. So streams
are woken in rounds: each stream has one turn in a round, and a few streams are woken in each turn
of the event loop. When a stream that had its turn has more tokens before the round is over, steps
come faster than the router can write. Then the waker rests for REST times the round's length, at
most MAX_REST_S, and the tokens that arrive meanwhile join a stream's next message. A router that
keeps up never rests; a router that does not keep up spends a third of its time on writing, and
keeps up with reading.
"""

import asyncio
from collections import deque
from typing import Protocol

REST = 2.0
MAX_REST_S = 0.02


class Sleeper(Protocol):
    """A stream that waits for its turn; only the waker sets last_round."""

    last_round: int

    def deliver(self) -> None:
        """Let the stream write: it has a turn."""
        ...


class Waker:
    """Owns the streams that wait for their turn, in order."""

    def __init__(self, *, batch: int = 8) -> None:
        """batch: streams woken in one turn of the event loop."""
        self._batch = batch
        self._round: deque[Sleeper] = deque()
        self._next: deque[Sleeper] = deque()
        self._is_scheduled = False
        self._is_behind = False
        self._round_number = 0
        self._began = 0.0

    def add(self, sleeper: Sleeper) -> None:
        """Give a stream a turn in the next round."""
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
