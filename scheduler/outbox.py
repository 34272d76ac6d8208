"""What waits to be sent to one router.

Pushing never blocks: while a message is still being written, the news of later steps is merged
into the next one, so a slow router gets fewer and larger messages and holds up nobody. What may
wait is bounded; beyond that the router is given up.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.vocabulary import RefusalReason
from scheduler.core.plan import EMPTY_INT32, Int32Array, RequestStatus
from scheduler.requests import UInt32Array

EMPTY_UINT32: UInt32Array = np.empty(0, dtype=np.uint32)
NO_DRAFTS: Int32Array = np.empty((0, 2), dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A request of this router ended. message is for a person, set for ERROR."""

    handle: int
    status: RequestStatus
    stop_token_id: int | None = None
    message: str = ""
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class FirstAdmission:
    """A request of this router got KV blocks for the first time, at time_s since the epoch."""

    handle: int
    num_cached_tokens: int
    time_s: float
    worker_id: str


@dataclass(frozen=True, slots=True)
class HandleLogprobs:
    """Log probabilities of one request; the items are the wire's.

    tokens: one per new token. prompt_tokens: one per prompt token but the first, or empty.
    """

    handle: int
    tokens: Sequence[object]
    prompt_tokens: Sequence[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one step (or several, merged) brought for one router; a handle comes up once."""

    handles: UInt32Array = field(default_factory=lambda: EMPTY_UINT32)  # [num_requests]
    num_new_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_requests]
    token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [sum(num_new_tokens)]
    # [num_requests, 2] drafts verified and accepted, or [0, 2] when nobody had any.
    draft_counts: Int32Array = field(default_factory=lambda: NO_DRAFTS)
    finished: tuple[Ending, ...] = ()
    admitted: tuple[FirstAdmission, ...] = ()
    logprobs: tuple[HandleLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class NotTaken:
    """A submission that was refused; field is the one that is INVALID, of the submission."""

    handle: int
    reason: RefusalReason
    message: str
    field: str = ""


@dataclass(frozen=True, slots=True)
class Parcel:
    """What is sent in one message."""

    news: News | None
    refusals: tuple[NotTaken, ...]


class OutboxClosedError(Exception):
    """All was taken, and nothing more will come."""


class Outbox:
    """The news of one router, in order. Any number push, one takes."""

    def __init__(self, max_waiting_tokens: int) -> None:
        self._max_waiting_tokens = max_waiting_tokens
        self._news: list[News] = []
        self._refusals: list[NotTaken] = []
        self._num_waiting_tokens = 0
        self._overflowed = asyncio.Event()
        self._is_closed = False
        self._filled = asyncio.Event()

    def push(self, news: News) -> None:
        """Add what a step brought."""
        if self._overflowed.is_set():
            return
        self._num_waiting_tokens += len(news.token_ids)
        self._news.append(news)
        if self._num_waiting_tokens > self._max_waiting_tokens:
            self._overflowed.set()
            self._news.clear()
        self._filled.set()

    def refuse(self, refusal: NotTaken) -> None:
        """Add a refusal."""
        self._refusals.append(refusal)
        self._filled.set()

    def close(self) -> None:
        """Nothing more will be pushed."""
        self._is_closed = True
        self._filled.set()

    async def overflowed(self) -> None:
        """Return once more waited than may wait; it was dropped, and nothing is taken in since.

        Whoever takes may be stuck in sending, so somebody else has to wait for this.
        """
        await self._overflowed.wait()

    async def take(self) -> Parcel:
        """All that waits, merged; waits until there is something.

        Raises:
            OutboxClosedError: when it is closed and empty.
        """
        await self._filled.wait()
        if self._is_closed and not (self._news or self._refusals):
            raise OutboxClosedError
        if not self._is_closed:
            self._filled.clear()
        parcel = Parcel(merge(self._news) if self._news else None, tuple(self._refusals))
        self._news = []
        self._refusals = []
        self._num_waiting_tokens = 0
        return parcel


def merge(news: Sequence[News]) -> News:
    """One piece of news that says what all of `news` say, in their order."""
    if len(news) == 1:
        return news[0]
    handles = np.concatenate([item.handles for item in news])
    num_new_tokens = np.concatenate([item.num_new_tokens for item in news])
    token_ids = np.concatenate([item.token_ids for item in news])
    # A stable sort keeps each request's tokens in the order of the steps.
    order = np.argsort(handles, kind="stable")
    starts = np.cumsum(num_new_tokens) - num_new_tokens  # [num_pieces]
    counts = num_new_tokens[order]
    new_starts = np.cumsum(counts) - counts
    source = np.repeat(starts[order] - new_starts, counts) + np.arange(len(token_ids))
    merged_handles, first = np.unique(handles[order], return_index=True)
    return News(
        handles=merged_handles,
        num_new_tokens=(
            np.add.reduceat(counts, first, dtype=np.int32) if len(first) else EMPTY_INT32
        ),
        token_ids=token_ids[source],
        draft_counts=_merge_draft_counts(news, order, first),
        finished=tuple(ending for item in news for ending in item.finished),
        admitted=tuple(admission for item in news for admission in item.admitted),
        logprobs=_merge_logprobs([entry for item in news for entry in item.logprobs]),
    )


def _merge_draft_counts(
    news: Sequence[News], order: NDArray[np.intp], first: NDArray[np.intp]
) -> Int32Array:
    """Sums by handle: order sorts the pieces by it, first is where each handle's begin."""
    if not any(len(item.draft_counts) for item in news):
        return NO_DRAFTS
    counts = [
        item.draft_counts if len(item.draft_counts) else np.zeros((len(item.handles), 2), np.int32)
        for item in news
    ]
    return np.add.reduceat(np.concatenate(counts)[order], first, axis=0, dtype=np.int32)


def _merge_logprobs(entries: Sequence[HandleLogprobs]) -> tuple[HandleLogprobs, ...]:
    by_handle: dict[int, HandleLogprobs] = {}
    for entry in entries:
        if (earlier := by_handle.get(entry.handle)) is not None:
            entry = HandleLogprobs(  # noqa: PLW2901
                entry.handle,
                [*earlier.tokens, *entry.tokens],
                [*earlier.prompt_tokens, *entry.prompt_tokens],
            )
        by_handle[entry.handle] = entry
    return tuple(by_handle.values())
