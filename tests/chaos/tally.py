"""Counts of a run, and how long the clients noticed each kill."""

import time
from collections import Counter
from dataclasses import dataclass, field

# A store is down for up to 4 s, and is looked for every few seconds.
_BEFORE_S, _AWAY_S = 2.0, 12.0


@dataclass(slots=True)
class _Watch:
    began_s: float
    waiting: set[str]


@dataclass(slots=True)
class Tally:
    """What happened; one for a run, written by everybody.

    The recovery time of a disturbance is the time until each stream that was delivering then has
    delivered again or ended.
    """

    kills: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    _store_killed_s: list[float] = field(default_factory=list)
    _reading: set[str] = field(default_factory=set)
    _watches: list[_Watch] = field(default_factory=list)

    @property
    def num_sigkills(self) -> int:
        return sum(n for what, n in self.kills.items() if what.startswith("SIGKILL"))

    def disturbed(self, what: str) -> None:
        """Something was killed, stopped or cut."""
        self.kills[what] += 1
        if what.endswith("store"):
            self._store_killed_s.append(time.monotonic())
        if self._reading:
            self._watches.append(_Watch(time.monotonic(), set(self._reading)))

    def progressed(self, request_id: str, *, is_prompt: bool = True) -> None:
        """A message has come; is_prompt: its client reads as fast as it can."""
        if is_prompt:
            self._reading.add(request_id)
        self._heard_of(request_id)

    def ended(self, request_id: str) -> None:
        """Its client waits for nothing more for now."""
        self._reading.discard(request_id)
        self._heard_of(request_id)

    def was_store_away(self, at_s: float) -> bool:
        """Whether the store, or the way there, was disturbed around this time.

        What is admitted then is not durable, and says so; a router that dies takes it along.
        """
        return any(
            killed_s - _BEFORE_S < at_s < killed_s + _AWAY_S for killed_s in self._store_killed_s
        )

    def sent_again(self, reason: str, began_s: float) -> None:
        """A client was told that its request is not known or not kept."""
        when = "while the store was away" if self.was_store_away(began_s) else "with a store"
        self.events[f"sent again: {reason}, admitted {when}"] += 1

    def violation(self, what: str) -> None:
        self.violations.append(what)

    def recovery_s_at(self, percent: float) -> float:
        """Nearest rank; 0 without any."""
        values = sorted(self.recovery_s)
        return values[min(len(values) - 1, int(len(values) * percent / 100))] if values else 0.0

    def _heard_of(self, request_id: str) -> None:
        if self._watches:
            for watch in self._watches:
                watch.waiting.discard(request_id)
            self._settle()

    def _settle(self) -> None:
        now = time.monotonic()
        self.recovery_s += [now - watch.began_s for watch in self._watches if not watch.waiting]
        self._watches = [watch for watch in self._watches if watch.waiting]
