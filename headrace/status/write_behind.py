"""Writes status updates a little later, in batches, so that serving never waits for the store.

Updates of a request are kept in order and merged where only the last counts. They are retried while
the store is away and dropped when no later change can make them legal. This module knows neither
Redis nor the state table.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace

from headrace.status.records import Update
from headrace.status.states import State

logger = logging.getLogger(__name__)

# Encoding a batch blocks the event loop, which also streams tokens; this many take 2 ms.
_MAX_BATCH_REQUESTS = 64
# Between two batches, unless a full one waits: a batch costs as much as ten requests' records.
_BATCH_GAP_S = 0.02
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
# The router's DISPATCHED and the scheduler's RUNNING race by milliseconds; seconds mean that the
# other writer is gone.
_EARLY_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Batch:
    """How a batch went.

    early: one per update, whether it has to be tried again; empty if nothing was written.
    failure: why the store could not be used, to try again; "" if it could.
    is_fatal: trying again is forbidden.
    """

    early: Sequence[bool] = ()
    num_refused: int = 0
    failure: str = ""
    is_fatal: bool = False


@dataclass(slots=True)
class _Chain:
    """Updates of one request, oldest first."""

    updates: list[Update] = field(default_factory=list)
    early_since: float | None = None


class WriteBehind:
    """The queue and its writer. `put` and `run` belong to one event loop."""

    def __init__(
        self,
        write: Callable[[Sequence[Update]], Awaitable[Batch]],
        *,
        max_requests: int,
        clock: Callable[[], float],
    ) -> None:
        """`write` must not raise; max_requests bounds the memory while the store is away."""
        self._write = write
        self._max_requests = max_requests
        self._clock = clock
        self._pending: dict[str, _Chain] = {}
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_broken = False
        self.is_healthy = False
        self.num_refused = 0

    def put(self, update: Update) -> None:
        """Queues an update; never waits."""
        chain = self._pending.get(update.request_id)
        if chain is None:
            if self._is_broken or len(self._pending) >= self._max_requests:
                self.num_refused += 1
                return
            chain = self._pending[update.request_id] = _Chain()
        _append(chain.updates, update)
        self._has_work.set()
        self._is_idle.clear()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or being written; False if that took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return not self._is_broken

    async def run(self) -> None:
        """Writes until cancelled, or until the store refuses the credentials."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            # A store that is away is tried even when there is nothing to write.
            if self.is_healthy:
                await self._has_work.wait()
            taken = self._take()
            batch = await self._write([u for chain in taken.values() for u in chain.updates])
            if batch.is_fatal:
                self._give_up(len(taken))
                return
            self._note_health(batch.failure)
            if batch.failure:
                self._put_back(taken.items())
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                continue
            backoff_s = _FIRST_BACKOFF_S
            self.num_refused += batch.num_refused
            self._put_back(self._early_rest(taken, batch.early))
            if any(batch.early) or len(self._pending) < _MAX_BATCH_REQUESTS:
                await asyncio.sleep(_BATCH_GAP_S)

    def _take(self) -> dict[str, _Chain]:
        """The oldest chains, no longer pending."""
        ids = list(self._pending)[:_MAX_BATCH_REQUESTS]
        return {request_id: self._pending.pop(request_id) for request_id in ids}

    def _put_back(self, chains: Iterable[tuple[str, _Chain]]) -> None:
        """Chains that must be written again go before what came meanwhile."""
        for request_id, chain in chains:
            newer = self._pending.get(request_id)
            for update in newer.updates if newer is not None else ():
                _append(chain.updates, update)
            self._pending[request_id] = chain
        if not self._pending:
            self._has_work.clear()
            self._is_idle.set()

    def _early_rest(
        self, taken: dict[str, _Chain], early: Sequence[bool]
    ) -> Iterable[tuple[str, _Chain]]:
        """What of each chain is still to be written, given which updates were early."""
        now = self._clock()
        begin = 0
        for request_id, chain in taken.items():
            flags = early[begin : begin + len(chain.updates)]
            begin += len(chain.updates)
            if not any(flags):
                continue
            since = chain.early_since if flags[0] and chain.early_since is not None else now
            if now - since > _EARLY_PATIENCE_S:
                self.num_refused += 1
                logger.warning(
                    "status of %s: %s never became possible", request_id, chain.updates[0].state
                )
                continue
            first = list(flags).index(True)
            yield request_id, _Chain(chain.updates[first:], since)

    def _note_health(self, failure: str) -> None:
        if failure and self.is_healthy:
            logger.warning("status store is away, serving goes on without it: %s", failure)
        if not failure and not self.is_healthy:
            logger.info("status store is here")
        self.is_healthy = not failure

    def _give_up(self, num_taken: int) -> None:
        self.is_healthy = False
        self._is_broken = True
        self.num_refused += num_taken + len(self._pending)
        self._pending.clear()
        self._is_idle.set()


def _append(updates: list[Update], update: Update) -> None:
    """Adds an update to a chain, merged where the steps between need not be seen.

    A request that is preempted, or paused, and resumed for hours while the store is away stays
    short.
    """
    flapping = {State.RUNNING, State.PREEMPTED, State.PAUSED}
    if updates and _same(updates[-1], update):
        updates[-1] = _merged(updates[-1], update)
    elif (
        len(updates) > 1
        and _same(updates[-2], update)
        and {updates[-1].state, update.state} <= flapping
    ):
        last = updates.pop()
        updates[-1] = _merged(_merged(updates[-1], last), update)
    else:
        updates.append(update)


def _same(one: Update, other: Update) -> bool:
    return (one.state, one.epoch, one.create_time_unix_s) == (
        other.state,
        other.epoch,
        other.create_time_unix_s,
    )


def _merged(old: Update, new: Update) -> Update:
    """The newer of two updates, with what only the older one knows."""
    known = {f.name: v for f in fields(Update) if (v := getattr(new, f.name)) is not None}
    return replace(old, **known)
