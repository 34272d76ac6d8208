"""Counts of a run, and how long the clients noticed each kill."""

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

logger = logging.getLogger("chaos")

# A server that is killed loses the end of what it has acknowledged (one second, appendfsync
# everysec).
_BEFORE_S = 1.5
# A request that was lost with so many schedulers is blamed for that (router/core/suspects.py).
_MAX_LOSSES = 3


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
    # Until all services have found it again.
    store_is_back_after_s: float = 3.0
    # When the store, or the way to it, was disturbed, and until when.
    _store_away_s: list[list[float]] = field(default_factory=list)
    progress_s: dict[str, float] = field(default_factory=dict)  # the last message of a request
    _scheduler_lost_s: list[float] = field(default_factory=list)
    _reading: set[str] = field(default_factory=set)
    _watches: list[_Watch] = field(default_factory=list)

    @property
    def num_sigkills(self) -> int:
        return sum(n for what, n in self.kills.items() if what.startswith("SIGKILL"))

    def disturbed(self, what: str) -> None:
        """Something was killed, stopped or cut."""
        self.kills[what] += 1
        logger.info(what)
        now = time.monotonic()
        # A router takes a broken connection for the loss of the scheduler behind it.
        if what.endswith("scheduler"):
            self._scheduler_lost_s.append(now)
        if self._reading:
            self._watches.append(_Watch(now, set(self._reading)))

    @contextlib.contextmanager
    def store_away(self) -> Iterator[None]:
        """The store, or the way to it, is disturbed meanwhile."""
        away = [time.monotonic(), math.inf]
        self._store_away_s.append(away)
        try:
            yield
        finally:
            away[1] = time.monotonic()

    def progressed(self, request_id: str, *, is_prompt: bool = True) -> None:
        """A message has come; is_prompt: its client reads as fast as it can."""
        self.progress_s[request_id] = time.monotonic()
        if is_prompt:
            self._reading.add(request_id)
        self._heard_of(request_id)

    def ended(self, request_id: str) -> None:
        """Its client waits for nothing more for now."""
        self._reading.discard(request_id)
        self._heard_of(request_id)

    def was_store_away(self, at_s: float, until_s: float | None = None) -> bool:
        """Whether the store, or the way there, was away at this time, or in a span of time.

        What is admitted then is not durable, and says so; a router that dies takes it along.
        """
        until_s = at_s if until_s is None else until_s
        return any(
            since - _BEFORE_S < until_s and at_s < until + self.store_is_back_after_s
            for since, until in self._store_away_s
        )

    def was_store_away_since(self, began_s: float) -> bool:
        """Whether the store, or a way to it, was away at any time since then."""
        return any(until > began_s - self.store_is_back_after_s for _, until in self._store_away_s)

    def may_be_blamed(self, began_s: float) -> bool:
        """Whether so many schedulers were lost since this time that a request is to blame."""
        return sum(lost_s > began_s for lost_s in self._scheduler_lost_s) >= _MAX_LOSSES

    def may_be_lost(self, reason: str, began_s: float, first_s: float | None) -> bool:
        """Whether a store that was away explains that a request, or its output, is not kept.

        The request was admitted between began_s and first_s.
        """
        if reason != "TOKENS_LOST":
            return self.was_store_away(began_s, first_s)
        # The end of the journal may be lost as well as its beginning.
        return self.was_store_away_since(began_s)

    def sent_again(
        self, request_id: str, reason: str, began_s: float, first_s: float | None
    ) -> None:
        """A client was told that its request is not known or not kept."""
        self.events[f"sent again: {reason}"] += 1
        if not self.may_be_lost(reason, began_s, first_s):
            self.violation(f"{request_id}: {reason}, though it was admitted with a store")

    def violation(self, what: str) -> None:
        logger.warning(what)
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
