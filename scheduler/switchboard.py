"""Sends the news of each step to the routers that wait for it.

One piece of news per router and step, built by selecting columns. Every request's end passes
through here, once. Knows routers and handles, not workers.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from scheduler.core.plan import EMPTY_INT32, FinishedRequest, Int32Array, Int64Array
from scheduler.journal import Journal
from scheduler.outbox import NO_DRAFTS, Ending, FirstAdmission, HandleLogprobs, News, Outbox
from scheduler.requests import Home, LiveRequest, RequestTable, Submission

EMPTY_INT64: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Finish:
    """A live request ended; message is for a person."""

    request: LiveRequest
    facts: FinishedRequest
    message: str = ""

    def for_router(self) -> Ending:
        return Ending(
            handle=self.request.submission.handle,
            status=self.facts.status,
            stop_token_id=self.facts.stop_token_id,
            message=self.message,
            num_preemptions=self.facts.num_preemptions,
        )


@dataclass(frozen=True, slots=True)
class Start:
    """A live request was admitted for the first time, at time_s since the epoch."""

    request: LiveRequest
    num_cached_tokens: int
    time_s: float
    worker_id: str

    def for_router(self) -> FirstAdmission:
        return FirstAdmission(
            self.request.submission.handle, self.num_cached_tokens, self.time_s, self.worker_id
        )


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """Log probabilities of a live request's new tokens; the items are the wire's."""

    request: LiveRequest
    tokens: Sequence[object]
    prompt_tokens: Sequence[object]

    def for_router(self) -> HandleLogprobs:
        return HandleLogprobs(self.request.submission.handle, self.tokens, self.prompt_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """What happened to the requests of one worker; finished ones end after their tokens here."""

    keys: Int64Array = field(default_factory=lambda: EMPTY_INT64)  # [num_requests]
    num_new_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_requests]
    token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [sum(num_new_tokens)]
    # [num_requests, 2] drafts verified and accepted, or [0, 2] when nobody had any.
    draft_counts: Int32Array = field(default_factory=lambda: NO_DRAFTS)
    finished: Sequence[Finish] = ()
    started: Sequence[Start] = ()
    details: Sequence[TokenDetails] = ()


class Bell:
    """Tells watchers that something changed; costs next to nothing while nobody waits."""

    def __init__(self) -> None:
        self.num_rings = 0
        self._event: asyncio.Event | None = None

    def ring(self) -> None:
        """Something changed."""
        self.num_rings += 1
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, num_rings: int, timeout_s: float) -> None:
        """Until it has rung more than num_rings times, or for timeout_s."""
        if self.num_rings != num_rings:
            return
        event = self._event = self._event or asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()


class Switchboard:
    """The routers' outboxes and all live requests. The bell rings when their number changes."""

    def __init__(self, journal: Journal) -> None:
        self.requests = RequestTable()
        self.bell = Bell()
        self.journal = journal
        self._outboxes: dict[int, Outbox] = {}
        self._by_handle: dict[int, dict[int, LiveRequest]] = {}
        self._num_opened = 0

    def open(self, outbox: Outbox) -> int:
        """Take a router in; its number is never given again."""
        self._num_opened += 1
        self._outboxes[self._num_opened] = outbox
        self._by_handle[self._num_opened] = {}
        return self._num_opened

    def close(self, connection: int) -> list[LiveRequest]:
        """Send nothing more there; returns its live requests, which are the caller's to end."""
        del self._outboxes[connection]
        return list(self._by_handle.pop(connection).values())

    def add(self, connection: int, submission: Submission, home: Home) -> LiveRequest:
        """Take a request in; neither its id nor its handle may be live."""
        request = self.requests.add(connection, submission, home)
        self._by_handle[connection][submission.handle] = request
        return request

    def find(self, connection: int, handle: int) -> LiveRequest | None:
        """The live request that a router means by a handle."""
        return self._by_handle[connection].get(handle)

    def publish(self, news: StepNews) -> None:
        """Send a step's news to whom it concerns, then forget the requests that ended."""
        self.requests.count_tokens(news.keys, news.num_new_tokens)
        connections, handles = self.requests.routes(news.keys)
        concerned = _connections_of(connections, news)
        for connection in concerned:
            if (outbox := self._outboxes.get(connection)) is None:
                continue
            draft_counts = news.draft_counts
            if len(concerned) == 1:
                columns = handles, news.num_new_tokens, news.token_ids
            else:
                mine = connections == connection  # [num_requests]
                mine_by_token = np.repeat(mine, news.num_new_tokens)
                columns = handles[mine], news.num_new_tokens[mine], news.token_ids[mine_by_token]
                draft_counts = draft_counts[mine] if len(draft_counts) else draft_counts
            outbox.push(
                News(
                    handles=columns[0],
                    num_new_tokens=columns[1],
                    token_ids=columns[2],
                    draft_counts=draft_counts,
                    finished=_for_router(connection, news.finished),
                    admitted=_for_router(connection, news.started),
                    logprobs=_for_router(connection, news.details),
                )
            )
        for finish in news.finished:
            self._forget(finish)
        self.bell.ring()

    def _forget(self, finish: Finish) -> None:
        request = finish.request
        num_generated = self.requests.num_generated(request)
        self.journal.finished(request, finish.facts, finish.message, num_generated)
        self.requests.remove(request)
        if (by_handle := self._by_handle.get(request.connection)) is not None:
            del by_handle[request.submission.handle]


ForRouter_co = TypeVar("ForRouter_co", covariant=True)


class _Item(Protocol[ForRouter_co]):
    """Something about one live request."""

    @property
    def request(self) -> LiveRequest: ...

    def for_router(self) -> ForRouter_co: ...


def _for_router(connection: int, items: Sequence[_Item[ForRouter_co]]) -> tuple[ForRouter_co, ...]:
    return tuple(item.for_router() for item in items if item.request.connection == connection)


def _connections_of(connections: Int32Array, news: StepNews) -> set[int]:
    concerned = {finish.request.connection for finish in news.finished}
    concerned.update(start.request.connection for start in news.started)
    if len(connections):
        first = int(connections[0])
        concerned.add(first)
        # Nearly always there is one router, and one comparison settles it.
        if (connections != first).any():
            concerned.update(np.unique(connections).tolist())
    return concerned
