"""The status of requests, in any server that speaks the Redis protocol (7.0 or newer).

Each completion has a record and a journal of its tokens; each request has a spec. Scripts compare
and set a record: they check the state table and the epoch, and set TTLs, in one step. An id that is
reused after its request has ended gets new records. `states` decides which transition is legal,
and `write_behind` when something is written. Any router can take up a request from what is stored
(`load`), after it has claimed the request (`claim`).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn, Self

from headrace.status import states
from headrace.status.batches import BatchWriter
from headrace.status.connect import Connection
from headrace.status.keys import Keys
from headrace.status.live import LiveIndex
from headrace.status.records import (
    JournalSource,
    OnSuperseded,
    Record,
    Stored,
    Update,
    Verdict,
    WriteOutcome,
    parse_name,
)
from headrace.status.scripts import write_script
from headrace.status.states import State, Writer
from headrace.status.stored import StoredRequests
from headrace.status.write_behind import WriteBehind


class StatusStore:
    """One writer's access to the store. Owns its connections; `aclose` closes them.

    `record` and `source` are for the token path: a task (`run`) writes in batches what is recorded
    and what the source has. The awaitable calls wait for the store's answer, for `timeout_s` at
    most, and raise ServiceError while the store is away. With an empty URL there is no store:
    nothing is kept and nothing fails.
    """

    def __init__(
        self,
        url: str,
        writer: Writer,
        *,
        live_ttl_s: float = 24 * 3600.0,
        finished_ttl_s: float = 3600.0,
        timeout_s: float = 2.0,
        max_pending_completions: int = 100_000,
        max_pending_bytes: int = 256 << 20,
        prefix: str = "headrace",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Connects at first use; raises ValueError for a URL that is not understood.

        Args:
            url: see `connect`; "" is no store.
            writer: whose transitions may be written.
            live_ttl_s: the TTL of a request's keys after its last change while the request is live.
            finished_ttl_s: their TTL after the request's end.
            timeout_s: how long a connection or an answer may take.
            max_pending_completions: completions queued while the store is unreachable; more are
                dropped.
            max_pending_bytes: specs and tokens queued meanwhile; more are dropped.
            prefix: first part of every key, so that several pools can share a server.
            clock: monotonic seconds.
            wall_clock: seconds since the epoch.
        """
        self._writer = writer
        self._writable = frozenset(s for s in State if states.writes(s, writer))
        self._backend: _Backend | None = None
        # Whether a store is configured.
        self.is_configured = bool(url)
        if url:
            self._backend = _Backend(
                url,
                writer,
                prefix=prefix,
                ttls_s=(live_ttl_s, finished_ttl_s),
                timeout_s=timeout_s,
                clocks=(clock, wall_clock),
            )
            self._behind = WriteBehind(
                self._backend.batches.write,
                max_completions=max_pending_completions,
                max_bytes=max_pending_bytes,
                clock=clock,
            )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @property
    def is_durable(self) -> bool:
        """Whether recent updates have reached the store."""
        return self._backend is not None and self._behind.is_keeping_up

    @property
    def num_refused(self) -> int:
        """Items that the store refused, or that were dropped while the store was unreachable."""
        return self._behind.num_refused if self._backend is not None else 0

    @property
    def lag_s(self) -> float:
        """How long the oldest queued item has waited; 0 when there is none."""
        return self._behind.lag_s if self._backend is not None else 0.0

    @property
    def num_waiting(self) -> int:
        """Completions that have something queued."""
        return self._behind.num_waiting if self._backend is not None else 0

    @property
    def source(self) -> JournalSource | None:
        """Where tokens and final updates come from; asked before each batch."""
        return self._behind.source if self._backend is not None else None

    @source.setter
    def source(self, source: JournalSource | None) -> None:
        if self._backend is not None:
            self._behind.source = source

    def watch(self, on_superseded: OnSuperseded) -> None:
        """Tells of completions of this writer that another owner has taken up or ended.

        What this writer has recorded of such a completion was refused.
        """
        if self._backend is not None:
            self._behind.on_superseded = on_superseded

    def record(self, update: Update) -> None:
        """Queues an update and returns at once; `run` writes the updates in order per completion.

        Raises ValueError when this writer may never write the state, or the id is invalid.
        """
        self._check(update)
        if self._backend is not None:
            self._behind.put(update)

    async def run(self) -> None:
        """Writes queued updates until cancelled. Never raises because of the store."""
        if self._backend is not None:
            await self._behind.run()

    async def flush(self, timeout_s: float) -> bool:
        """Waits until all queued updates are written or refused; False after the timeout."""
        return self._backend is None or await self._behind.flush(timeout_s)

    async def ping(self) -> None:
        """Raises ServiceError when the store is unusable; the error says whether to fix or wait."""
        if self._backend is not None:
            await self._backend.connection.call(("PING",))

    async def apply(self, update: Update) -> WriteOutcome:
        """Compare-and-set now; APPLIED without a store."""
        self._check(update)
        outcomes = {}
        if self._backend is not None:
            outcomes = await self._backend.batches.evaluate([[update]])
        return outcomes.get(0, WriteOutcome(Verdict.APPLIED))

    async def get(self, name: str) -> Record | None:
        """A completion's record; None if absent or expired."""
        return await self._backend.stored.get(name) if self._backend is not None else None

    async def records(self, request_id: str) -> list[Record]:
        """The records of all completions of a request, in order; [] for an unknown request."""
        return await self._backend.stored.records(request_id) if self._backend is not None else []

    async def load(self, request_id: str) -> Stored | None:
        """All that is kept of a request, at one moment; None for an unknown request."""
        return await self._backend.stored.load(request_id) if self._backend is not None else None

    async def claim(
        self,
        stored: Stored,
        state: State,
        *,
        router_id: str,
        router_incarnation: str,
        detail: str = "",
        is_recovery: bool = False,
    ) -> Stored | None:
        """Takes a request from whoever has it: QUEUED to take it up, ABORTED or ERROR to end it.

        All completions that have not ended change at once, to the next epoch: later writes under
        older epochs are refused. Returns `stored` with the new records, or None when the request
        has changed owners or a completion has ended since `stored` was loaded; load it again then.
        A request that has ended is returned as it is.
        """
        if self._backend is None:
            return stored
        return await self._backend.stored.claim(
            stored,
            state,
            owner=(router_id, router_incarnation),
            detail=detail,
            is_recovery=is_recovery,
        )

    async def live_ids(self) -> AsyncIterator[str]:
        """The ids of all requests that have not ended; for people and tests, see `orphans`."""
        if self._backend is not None:
            async for records in self._backend.live.requests(of_the_dead=False):
                yield records[0].request_id.partition("#")[0]

    async def orphans(self) -> AsyncIterator[Sequence[Record]]:
        """The records of each request that has not ended and whose router is dead (`is_dead`).

        Cheap while no router is dead.
        """
        if self._backend is not None:
            async for records in self._backend.live.requests(of_the_dead=True):
                yield records

    async def hold_lease(self, role: str, name: str, incarnation: str) -> NoReturn:
        """Says that this process lives, until cancelled; its tokens are written under this name.

        role is "router" or "scheduler". A process that starts later under the same name takes the
        lease over.
        """
        if self._backend is None:
            await asyncio.Future()
            raise AssertionError("never done")
        self._backend.batches.owner = (name, incarnation)
        await self._backend.live.hold(role, name, incarnation)

    async def incarnation_of(self, role: str, name: str) -> str:
        """The incarnation of the process that holds this lease; "": no process does."""
        if self._backend is None:
            return ""
        return await self._backend.live.incarnation_of(role, name)

    async def is_dead(self, role: str, name: str, incarnation: str) -> bool:
        """Whether a process is surely dead; an empty incarnation means any process of this name.

        Another incarnation with the lease proves a death at once. A missing lease proves it only
        if this process has held its own for so long that every living process has had time to
        renew its own since the store was last away.
        """
        return self._backend is not None and await self._backend.live.is_dead(
            role, name, incarnation
        )

    async def aclose(self) -> None:
        """Closes the connections; queued updates are lost unless flushed."""
        if self._backend is not None:
            await self._backend.connection.aclose()

    def _check(self, update: Update) -> None:
        parse_name(update.request_id)
        if update.state not in self._writable:
            raise ValueError(f"{update.state} is never written by the {self._writer}")


class _Backend:
    """A connection and what speaks over it."""

    def __init__(
        self,
        url: str,
        writer: Writer,
        *,
        prefix: str,
        ttls_s: tuple[float, float],
        timeout_s: float,
        clocks: tuple[Callable[[], float], Callable[[], float]],
    ) -> None:
        """ttls_s: of live and of ended requests; clocks: monotonic and since the epoch."""
        ttls_ms = {"live_ttl_ms": int(ttls_s[0] * 1000), "ended_ttl_ms": int(ttls_s[1] * 1000)}
        keys = Keys(prefix)
        self.connection = Connection(url, timeout_s, clock=clocks[0])
        self.live = LiveIndex(self.connection, keys, ttl_s=ttls_s[0], clock=clocks[0])
        self.batches = BatchWriter(
            self.connection, keys, self.live, writer, write_script(writer, **ttls_ms)
        )
        self.stored = StoredRequests(
            self.connection, keys, self.live, self.batches, ttls_ms=ttls_ms, wall_clock=clocks[1]
        )
