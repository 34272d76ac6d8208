"""Writes status updates in batches, in the background, so that serving never waits for the store.

Updates of a request are kept in order and merged where only the last counts. Updates are retried
while the store is unreachable, and dropped when no later transition can make them legal. This
module knows neither Redis nor the state table.
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
# Pause between batches, unless a full batch waits: a batch's fixed cost equals ten records'.
_BATCH_GAP_S = 0.02
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
# The router's DISPATCHED and the scheduler's RUNNING race by milliseconds; a gap of seconds means
# that the other writer is gone.
_EARLY_PATIENCE_S = 5.0


@dataclass(frozen=True, slots=True)
class Batch:
    """The outcome of a batch.

    early: one per update, whether to retry the update; empty if nothing was written.
    failure: why the batch failed and should be retried; "" if it was written.
    is_fatal: the batch must not be retried.
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
        """`write` must not raise; max_requests bounds memory while the store is unreachable."""
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
        """Waits until nothing is queued or being written; False after the timeout."""
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
            # An unreachable store is pinged even when there is nothing to write.
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
        """Removes the oldest chains from the queue and returns them."""
        ids = list(self._pending)[:_MAX_BATCH_REQUESTS]
        return {request_id: self._pending.pop(request_id) for request_id in ids}

    def _put_back(self, chains: Iterable[tuple[str, _Chain]]) -> None:
        """Requeues chains to retry, ahead of updates queued since."""
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
        """The updates of each chain that remain to be written, given which were early."""
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
    """Adds an update to a chain, merging updates whose intermediate states need not be seen.

    So the chain of a request that is preempted or paused and resumed for hours while the store is
    unreachable stays short.
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
    """The newer of two updates, with fields that are None filled in from the older update."""
    known = {f.name: v for f in fields(Update) if (v := getattr(new, f.name)) is not None}
    return replace(old, **known)
