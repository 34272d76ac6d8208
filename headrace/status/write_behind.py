"""Writes status updates and tokens in batches, in the background; serving never waits for a store.

Items of a completion are kept in order, and updates merged where only the last counts. Items are
retried while the store is unreachable, and dropped when no later transition can make them legal.
The writer pauses so long after each batch that it takes a bounded share of the processor: when
there is more to write, batches are written later and become larger. This module knows neither
Redis nor the state table.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from headrace.status.metered import metered
from headrace.status.records import JournalSource, Tokens, Update, Verdict, WriteOutcome
from headrace.status.states import State

logger = logging.getLogger(__name__)

Item = Tokens | Update

# One batch blocks the event loop, which also streams tokens, and the server about a millisecond.
_MAX_BATCH_COMPLETIONS = 128
_MAX_BATCH_BYTES = 1 << 20
# Least pause between batches: a batch's fixed cost equals that of many items.
_BATCH_GAP_S = 0.02
# How often the source is asked while nothing else is queued.
_SOURCE_GAP_S = 0.1
# The writer's share of the event loop; the greater one while many completions wait.
_MAX_SHARE = 0.01
_MAX_HURRIED_SHARE = 0.05
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 2.0
# The router's DISPATCHED and the scheduler's RUNNING race by milliseconds; a gap of seconds means
# that the other writer is gone, or that the store has lost the record.
_EARLY_PATIENCE_S = 5.0
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


@dataclass(slots=True)
class _Chain:
    """Items of one completion, oldest first; since is when the first was queued."""

    since: float
    items: list[Item] = field(default_factory=list)
    num_bytes: int = 0
    early_since: float | None = None


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
        self._max_completions = max_completions
        self._max_bytes = max_bytes
        self._clock = clock
        self._processor_time = processor_time
        self._pending: dict[str, _Chain] = {}
        self._num_bytes = 0
        self._lost: set[str] = set()
        self._has_work = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._num_flushing = 0
        self._is_broken = False
        self.source: JournalSource | None = None
        self.is_healthy = False
        self.num_refused = 0

    @property
    def is_keeping_up(self) -> bool:
        """Whether the store is there and nothing waits for long."""
        if not self.is_healthy:
            return False
        oldest = next(iter(self._pending.values()), None)
        return oldest is None or self._clock() - oldest.since < _MAX_LAG_S

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
            # An unreachable store is pinged even when there is nothing to write.
            if self.is_healthy:
                await self._wait_for_work()
            must_wait, spent_s = await metered(self._write_some(), self._processor_time)
            if not self.is_healthy:
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)
                continue
            backoff_s = _FIRST_BACKOFF_S
            # Its share of the loop; what was early is early for a while.
            if must_wait or not self._num_flushing:
                await asyncio.sleep(max(_BATCH_GAP_S, spent_s * (1 / self._share - 1)))

    async def _wait_for_work(self) -> None:
        """Waits until something is queued, or until it is time to ask the source."""
        if self._pending:
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
            if not self._pending:
                self._is_idle.set()
                return False
        taken = self._take()
        batch = await self._write([chain.items for chain in taken.values()])
        if batch.is_fatal:
            self._give_up(taken)
            return False
        self._note_health(batch.failure)
        rest = taken if batch.failure else self._rest(taken, batch.outcomes)
        self._put_back(rest.items())
        return any(chain.early_since is not None for chain in rest.values())

    @property
    def _share(self) -> float:
        """The writer's greatest share of the event loop."""
        is_hurried = len(self._pending) >= 8 * _MAX_BATCH_COMPLETIONS
        return _MAX_HURRIED_SHARE if is_hurried else _MAX_SHARE

    def _ask_source(self) -> None:
        """Queues what the source has, unless a full batch waits already."""
        if self.source is None or len(self._pending) >= _MAX_BATCH_COMPLETIONS:
            return
        for item in self.source.take():
            if item.request_id not in self._lost:
                self._put(item)
            elif isinstance(item, Update):
                self.num_refused += 1
                self._lost.discard(item.request_id)

    def _put(self, item: Item) -> None:
        chain = self._pending.get(item.request_id)
        num_bytes = _num_bytes(item)
        if self._num_bytes + num_bytes > self._max_bytes and isinstance(item, Update):
            # Without the spec, the request can be looked up but not be taken up again.
            item, num_bytes = replace(item, spec=None), 0
        if chain is None:
            if self._is_broken or len(self._pending) >= self._max_completions:
                self.num_refused += 1
                return
            chain = self._pending[item.request_id] = _Chain(self._clock())
        _append(chain.items, item)
        chain.num_bytes += num_bytes
        self._num_bytes += num_bytes
        self._has_work.set()
        self._is_idle.clear()

    def _take(self) -> dict[str, _Chain]:
        """Removes the oldest chains, one batch of them, from the queue and returns them."""
        taken: dict[str, _Chain] = {}
        num_bytes = 0
        for name, chain in self._pending.items():
            if len(taken) == _MAX_BATCH_COMPLETIONS or (taken and num_bytes > _MAX_BATCH_BYTES):
                break
            taken[name] = chain
            num_bytes += chain.num_bytes
        for name in taken:
            del self._pending[name]
        self._num_bytes -= num_bytes
        return taken

    def _put_back(self, chains: Iterable[tuple[str, _Chain]]) -> None:
        """Requeues chains to retry, ahead of items queued since."""
        for name, chain in chains:
            self._num_bytes += chain.num_bytes
            newer = self._pending.get(name)
            if newer is not None:
                for item in newer.items:
                    _append(chain.items, item)
                chain.num_bytes += newer.num_bytes
            self._pending[name] = chain

    def _rest(
        self, taken: dict[str, _Chain], outcomes: Mapping[int, WriteOutcome]
    ) -> dict[str, _Chain]:
        """What remains to be written of each chain, by the outcomes of its items."""
        if not outcomes:
            return {}
        rest: dict[str, _Chain] = {}
        stale: list[tuple[str, int]] = []
        begin = 0
        for name, chain in taken.items():
            count = len(chain.items)
            mine = {i: o for i in range(count) if (o := outcomes.get(begin + i)) is not None}
            begin += count
            if not mine:
                continue
            stale += {(name, chain.items[i].epoch) for i, o in mine.items() if o.is_superseded}
            if (left := self._left_of(chain, mine)) is not None:
                rest[name] = left
        if stale and self.source is not None:
            self.source.stale(stale)
        return rest

    def _left_of(self, chain: _Chain, outcomes: Mapping[int, WriteOutcome]) -> _Chain | None:
        """The part of a chain to write again: tokens that the store lacks, and what was early."""
        refused = {Verdict.STALE, Verdict.ILLEGAL, Verdict.BROKEN}
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
        return _Chain(chain.since, items, sum(map(_num_bytes, items)), since)

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
        logger.warning("status of %s: %s never became possible", item.request_id, what)
        if len(self._lost) < self._max_completions:
            self._lost.add(item.request_id)

    def _note_health(self, failure: str) -> None:
        if failure and self.is_healthy:
            logger.warning("status store is away, serving goes on without it: %s", failure)
        if not failure and not self.is_healthy:
            logger.info("status store is here")
        self.is_healthy = not failure

    def _give_up(self, taken: Mapping[str, _Chain]) -> None:
        self.is_healthy = False
        self._is_broken = True
        self.num_refused += len(taken) + len(self._pending)
        self._pending.clear()
        self._num_bytes = 0
        self._is_idle.set()


def _num_bytes(item: Item) -> int:
    """About what an item occupies beyond a fixed size."""
    if isinstance(item, Update):
        return len(item.spec or b"")
    num_bytes = len(item.token_ids)
    if item.logprobs or item.prompt_logprobs:
        num_bytes += sum(map(len, item.logprobs)) + sum(map(len, item.prompt_logprobs))
    return num_bytes


def _append(items: list[Item], item: Item) -> None:
    """Adds an item to a chain, merging updates whose intermediate states need not be seen.

    So the chain of a request that is preempted or paused and resumed for hours while the store is
    unreachable stays short.
    """
    flapping = {State.RUNNING, State.PREEMPTED, State.PAUSED}
    last, before = (None, None, *items)[:-3:-1]
    if not isinstance(item, Update) or not isinstance(last, Update):
        items.append(item)
    elif _same(last, item):
        items[-1] = _merged(last, item)
    elif (
        isinstance(before, Update) and _same(before, item) and {last.state, item.state} <= flapping
    ):
        items[-2:] = [_merged(_merged(before, last), item)]
    else:
        items.append(item)


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
