"""Writes status updates and tokens in batches, in the background; serving never waits for a store.

Items are retried while the store is unreachable, and dropped when no later transition can make them
legal. The writer takes a bounded share of the processor (`pacing`): when there is more to write,
batches are written later and become larger. This module knows neither Redis nor the state table.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.status.chains import Chain, ChainQueue, Item, num_bytes_of
from headrace.status.pacing import Pace, metered
from headrace.status.records import (
    JournalSource,
    OnSuperseded,
    Superseded,
    Tokens,
    Update,
    Verdict,
    WriteOutcome,
)

logger = logging.getLogger(__name__)

# One batch blocks the event loop, which also streams tokens, and the server about a millisecond.
_MAX_BATCH_COMPLETIONS = 128
_MAX_BATCH_BYTES = 1 << 20
# Least pause between batches: a batch's fixed cost equals that of many items.
_BATCH_GAP_S = 0.02
# How often the source is asked while nothing else is queued.
_SOURCE_GAP_S = 0.1
# A batch takes so many times what its own steps take: there are sockets, and tasks of a cluster's
# client. 1.6 was measured with one server, 2.7 with a cluster.
_UNSEEN = 3.0
# The writer's share of the event loop; the greater one while many completions wait.
_MAX_SHARE = 0.01
_MAX_HURRIED_SHARE = 0.05
# A request is kept soon after its arrival, unless much was written just before.
_MAX_CREDIT_S = 0.02
_MAX_PAUSE_S = 0.5
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
# The router's DISPATCHED and the scheduler's RUNNING race by milliseconds; a gap of seconds means
# that the other writer is gone, or that the store has lost the record.
_EARLY_PATIENCE_S = 5.0
# What was written in so many seconds before a failure is written again, up to so many bytes.
_REPEAT_S = 3.0
_MAX_REPEAT_BYTES = 64 << 20
# Older items mean that the store does not keep up.
_MAX_LAG_S = 5.0


@dataclass(frozen=True, slots=True)
class Batch:
    """The outcome of a batch.

    outcomes: of items that were not simply applied, by position in the batch.
    failure: why the batch failed and should be retried; "" if it was written.
    is_fatal: the batch must not be retried.
    """

    outcomes: Mapping[int, WriteOutcome] = field(default_factory=dict)
    failure: str = ""
    is_fatal: bool = False


class WriteBehind:
    """The queue and its writer. All calls are made on one event loop."""

    def __init__(
        self,
        write: Callable[[Sequence[Sequence[Item]]], Coroutine[Any, Any, Batch]],
        *,
        max_completions: int,
        max_bytes: int,
        clock: Callable[[], float],
        processor_time: Callable[[], float] = time.thread_time,
    ) -> None:
        """`write` takes the items by completion and must not raise.

        max_completions and max_bytes bound memory while the store is unreachable.
        """
        self._write = write
        self._queue = ChainQueue(max_completions=max_completions, max_bytes=max_bytes, clock=clock)
        self._max_completions = max_completions
        self._clock = clock
        self._pace = Pace(max_credit_s=_MAX_CREDIT_S, max_pause_s=_MAX_PAUSE_S, clock=clock)
        self._processor_time = processor_time
        self._lost: set[str] = set()
        # Written last, with the time; the store may lose them when it fails.
        self._written: deque[tuple[float, int, dict[str, Chain]]] = deque()
        self._num_written_bytes = 0
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_flushing = 0
        self._is_broken = False
        self.source: JournalSource | None = None
        self.on_superseded: OnSuperseded | None = None
        self.is_healthy = False
        self._was_away = False
        self.num_refused = 0

    @property
    def is_keeping_up(self) -> bool:
        """Whether the store is there and nothing waits for long."""
        return self.is_healthy and self._queue.lag_s < _MAX_LAG_S

    @property
    def lag_s(self) -> float:
        """How long the oldest queued item has waited; 0 when there is none."""
        return self._queue.lag_s

    @property
    def num_waiting(self) -> int:
        """Completions that have something queued."""
        return len(self._queue)

    def put(self, update: Update) -> None:
        """Queues an update; never waits."""
        # The record may be there again; a completion whose record is lost gets no other chance.
        self._lost.discard(update.request_id)
        self._put(update)

    async def flush(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or being written; False after the timeout."""
        if self._is_broken:
            return False
        self._num_flushing += 1
        if self.source is not None:
            self._is_idle.clear()
        self._has_work.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        finally:
            self._num_flushing -= 1
        return not self._is_broken

    async def run(self) -> None:
        """Writes until cancelled, or until the store refuses the credentials."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._is_broken:
            # An unreachable store is pinged even when there is nothing to write. Finding the store
            # takes long, and is not counted: what waits for it must not wait longer.
            was_healthy = self.is_healthy
            if was_healthy:
                await self._wait_for_work()
            must_wait, spent_s = await metered(self._write_some(), self._processor_time)
            if not self.is_healthy:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                continue
            backoff_s = _FIRST_BACKOFF_S
            pause_s = self._pace.pause_s(_UNSEEN * spent_s if was_healthy else 0.0, self._share)
            # What was early is early for a while.
            if must_wait or not self._num_flushing:
                await asyncio.sleep(max(_BATCH_GAP_S, pause_s))

    async def _wait_for_work(self) -> None:
        """Waits until something is queued, or until it is time to ask the source."""
        if self._queue:
            return
        self._has_work.clear()
        if self.source is None:
            self._is_idle.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SOURCE_GAP_S if self.source is not None else None):
                await self._has_work.wait()

    async def _write_some(self) -> bool:
        """Writes a batch of what is queued; returns whether some of it was early."""
        if self.is_healthy:
            self._ask_source()
            if not self._queue:
                self._is_idle.set()
                return False
        taken = self._queue.take(_MAX_BATCH_COMPLETIONS, _MAX_BATCH_BYTES)
        batch = await self._write([chain.items for chain in taken.values()])
        if batch.is_fatal:
            self._give_up(taken)
            return False
        self._note_health(batch.failure)
        if batch.failure:
            self._queue.put_back(taken)
            self._repeat_written()
            return False
        rest = self._rest(taken, batch.outcomes)
        self._queue.put_back(rest)
        self._note_written(taken)
        return any(chain.early_since is not None for chain in rest.values())

    @property
    def _share(self) -> float:
        """The writer's greatest share of the event loop."""
        is_hurried = len(self._queue) >= 8 * _MAX_BATCH_COMPLETIONS
        return _MAX_HURRIED_SHARE if is_hurried else _MAX_SHARE

    def _ask_source(self) -> None:
        """Queues what the source has, unless a full batch waits already."""
        if self.source is None or len(self._queue) >= _MAX_BATCH_COMPLETIONS:
            return
        for item in self.source.take():
            if item.request_id not in self._lost:
                self._put(item)
            elif isinstance(item, Update):
                self.num_refused += 1
                self._lost.discard(item.request_id)

    def _put(self, item: Item) -> None:
        if self._is_broken or not self._queue.put(item):
            self.num_refused += 1
            return
        self._has_work.set()
        self._is_idle.clear()

    def _rest(
        self, taken: dict[str, Chain], outcomes: Mapping[int, WriteOutcome]
    ) -> dict[str, Chain]:
        """What remains to be written of each chain, by the outcomes of its items."""
        if not outcomes:
            return {}
        rest: dict[str, Chain] = {}
        superseded: list[Superseded] = []
        begin = 0
        for name, chain in taken.items():
            count = len(chain.items)
            mine = {i: o for i in range(count) if (o := outcomes.get(begin + i)) is not None}
            begin += count
            if not mine:
                continue
            superseded += {
                Superseded(name, chain.items[i].epoch, o.state)
                for i, o in mine.items()
                if o.is_superseded and o.state is not None
            }
            if (left := self._left_of(chain, mine)) is not None:
                rest[name] = left
        if superseded and self.on_superseded is not None:
            self.on_superseded(superseded)
        return rest

    def _left_of(self, chain: Chain, outcomes: Mapping[int, WriteOutcome]) -> Chain | None:
        """The part of a chain to write again: tokens that the store lacks, and what was early."""
        refused = {Verdict.STALE, Verdict.ILLEGAL, Verdict.BROKEN}
        if not chain.is_repeated:
            self.num_refused += sum(o.verdict in refused for o in outcomes.values())
        items: list[Item] = []
        gap = next((i for i, o in outcomes.items() if o.verdict is Verdict.GAP), None)
        if gap is not None and (tokens := self._again(chain.items[gap], outcomes[gap])) is not None:
            items.append(tokens)
        early = next((i for i, o in outcomes.items() if o.verdict is Verdict.EARLY), None)
        since = None
        if early is not None:
            now = self._clock()
            since = now if early or chain.early_since is None else chain.early_since
            if now - since > _EARLY_PATIENCE_S:
                self._lose(chain.items[early])
            else:
                items += chain.items[early:]
        if not items:
            return None
        return Chain(chain.since, items, sum(map(num_bytes_of, items)), since)

    def _again(self, item: Item, outcome: WriteOutcome) -> Tokens | None:
        """The tokens that the store lacks, as the source has them."""
        tokens = None
        if self.source is not None:
            tokens = self.source.again(item.request_id, item.epoch, outcome.num_tokens)
        if tokens is None:
            self.num_refused += 1
            logger.debug("journal of %s: lost after %d", item.request_id, outcome.num_tokens)
        return tokens

    def _lose(self, item: Item) -> None:
        """Gives up a completion whose record does not come."""
        self.num_refused += 1
        what = item.state if isinstance(item, Update) else "its journal"
        logger.warning(
            "status of %s: %s never became possible",
            *(item.request_id, what),
            extra={"request_id": item.request_id},
        )
        if len(self._lost) < self._max_completions:
            self._lost.add(item.request_id)

    def _note_written(self, chains: Mapping[str, Chain]) -> None:
        """Keeps what was written in the last seconds of writing."""
        now = self._clock()
        fresh = {name: chain for name, chain in chains.items() if not chain.is_repeated}
        if fresh:
            num_bytes = sum(chain.num_bytes for chain in fresh.values())
            self._written.append((now, num_bytes, fresh))
            self._num_written_bytes += num_bytes
        while self._written and (
            now - self._written[0][0] > _REPEAT_S or self._num_written_bytes > _MAX_REPEAT_BYTES
        ):
            self._num_written_bytes -= self._written.popleft()[1]

    def _repeat_written(self) -> None:
        """Queues again what was written just before the store failed.

        A server that is killed, or replaced by its replica, loses the last of what it has
        acknowledged. Writing twice does no harm.
        """
        while self._written:
            _, num_bytes, chains = self._written.pop()
            self._num_written_bytes -= num_bytes
            for chain in chains.values():
                chain.is_repeated = True
            self._queue.put_back(chains)

    def _note_health(self, failure: str) -> None:
        if failure and self.is_healthy:
            logger.warning("status store is away, serving goes on without it: %s", failure)
            self._was_away = True
        if not failure and not self.is_healthy:
            level = logging.WARNING if self._was_away else logging.INFO
            logger.log(level, "status store is %s", "back" if self._was_away else "here")
        self.is_healthy = not failure

    def _give_up(self, taken: Mapping[str, Chain]) -> None:
        self.is_healthy = False
        self._is_broken = True
        self.num_refused += len(taken) + len(self._queue)
        self._queue.clear()
        self._is_idle.set()
