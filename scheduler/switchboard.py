"""Distributes each step's output to the routers whose requests it concerns.

One update per router and step, made by selecting columns. Every request's end passes through here,
once. Knows routers and handles, not workers.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from scheduler.core.plan import EMPTY_INT32, Int32Array, Int64Array, StepOutput
from scheduler.outbox import RouterOutbox
from scheduler.request_log import RequestLog
from scheduler.requests import (
    NO_ROUTER,
    FirstAdmission,
    LiveRequest,
    LiveRequestTable,
    RequestOwner,
    Submission,
)
from scheduler.updates import (
    NO_DRAFTS,
    NewAdmission,
    NewLogprobs,
    NotTaken,
    RequestEnd,
    RouterUpdate,
)

_EMPTY_INT64: Int64Array = np.empty(0, dtype=np.int64)
# The output of no step.
NO_OUTPUT = StepOutput(
    step_id=0, keys=_EMPTY_INT64, num_new_tokens=EMPTY_INT32, token_ids=EMPTY_INT32, finished=()
)


class ChangeSignal:
    """Wakes tasks that wait for a change; nearly free while no task waits."""

    def __init__(self) -> None:
        self.num_changes = 0
        self._event: asyncio.Event | None = None

    def notify(self) -> None:
        """Note a change and wake the waiting tasks."""
        self.num_changes += 1
        if self._event is not None:
            self._event.set()
            self._event = None

    async def wait(self, num_changes: int, timeout_s: float) -> None:
        """Return when more than num_changes changes were noted, or after timeout_s."""
        if self.num_changes != num_changes:
            return
        event = self._event = self._event or asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()


class Switchboard:
    """The routers' outboxes and all live requests.

    `changes` is notified when requests come and go or a worker's load or state changes.
    """

    def __init__(self, log: RequestLog) -> None:
        self.requests = LiveRequestTable()
        self.changes = ChangeSignal()
        self.log = log
        self._outboxes: dict[int, RouterOutbox] = {}
        self._by_handle: dict[int, dict[int, LiveRequest]] = {}
        self._num_opened = NO_ROUTER

    def open(self, outbox: RouterOutbox) -> int:
        """Register a router's outbox; returns the connection's number, which is never reused."""
        self._num_opened += 1
        self._outboxes[self._num_opened] = outbox
        self._by_handle[self._num_opened] = {}
        return self._num_opened

    def close(self, connection: int) -> list[LiveRequest]:
        """Unregister a router's outbox; returns its live requests, which no router has now."""
        del self._outboxes[connection]
        requests = list(self._by_handle.pop(connection).values())
        for request in requests:
            self.requests.route(request, NO_ROUTER, 0)
        return requests

    def add(self, connection: int, submission: Submission, owner: RequestOwner) -> LiveRequest:
        """Register a request; neither its id nor its handle may be live."""
        request = self.requests.add(connection, submission, owner)
        self._by_handle[connection][submission.handle] = request
        return request

    def find(self, connection: int, handle: int) -> LiveRequest | None:
        """The live request of a router's handle, or None."""
        return self._by_handle[connection].get(handle)

    def detach(self, request: LiveRequest, refusal: NotTaken | None = None) -> None:
        """Take a request from its router, which is told that the request has moved.

        With a refusal the router is told that instead, and submits the request elsewhere.
        """
        by_handle = self._by_handle.get(request.connection)
        if by_handle is not None:
            handle = request.submission.handle
            del by_handle[handle]
            moved = RouterUpdate(moved=(handle,))
            update = moved if refusal is None else RouterUpdate(refusals=(refusal,))
            self.tell(request.connection, update)
        self.requests.route(request, NO_ROUTER, 0)

    def attach(self, request: LiveRequest, connection: int, submission: Submission) -> None:
        """Give a request that no router has to the router of a new submission of it."""
        assert request.connection == NO_ROUTER, "a request has two routers"
        handle = submission.handle
        request.submission = replace(request.submission, handle=handle, epoch=submission.epoch)
        self.requests.route(request, connection, handle)
        self._by_handle[connection][handle] = request

    def tell(self, connection: int, update: RouterUpdate) -> None:
        """Tell a router something."""
        self._outboxes[connection].push(update)

    def tell_all(self, update: RouterUpdate) -> None:
        """Tell every router something."""
        for outbox in self._outboxes.values():
            outbox.push(update)

    def publish(
        self,
        output: StepOutput = NO_OUTPUT,
        *,
        draft_counts: Int32Array = NO_DRAFTS,
        ends: Sequence[RequestEnd] = (),
        admissions: Sequence[tuple[LiveRequest, FirstAdmission]] = (),
        logprobs: Sequence[NewLogprobs] = (),
    ) -> None:
        """Tell each router what a step brought for its requests; forget the requests that ended.

        Args:
            output: tokens by request; its `finished` are in `ends`.
            draft_counts: [num_outputs, 2] drafts verified and accepted, or [0, 2] for none.
            ends: requests that ended, after their tokens in `output`.
            admissions: requests that were admitted for the first time.
            logprobs: of the tokens in `output`.
        """
        keys, num_new_tokens = output.keys, output.num_new_tokens
        self.requests.count_tokens(keys, num_new_tokens)
        connections, handles = self.requests.routes(keys)
        for request, admission in admissions:
            request.admission = admission
        concerned = _connections_of(connections, ends, admissions)
        for connection in concerned:
            if (outbox := self._outboxes.get(connection)) is None:
                continue
            columns = handles, num_new_tokens, output.token_ids, draft_counts
            if len(concerned) > 1:
                mine = connections == connection  # [num_requests]
                mine_by_token = np.repeat(mine, num_new_tokens)
                columns = (
                    handles[mine],
                    num_new_tokens[mine],
                    output.token_ids[mine_by_token],
                    draft_counts[mine] if len(draft_counts) else draft_counts,
                )
            outbox.push(
                RouterUpdate(
                    handles=columns[0],
                    num_new_tokens=columns[1],
                    token_ids=columns[2],
                    draft_counts=columns[3],
                    ends=tuple(e for e in ends if e.request.connection == connection),
                    # With the handle of now: another router may have the request at the time of
                    # sending.
                    admissions=tuple(
                        NewAdmission(request.submission.handle, admission)
                        for request, admission in admissions
                        if request.connection == connection
                    ),
                    logprobs=tuple(p for p in logprobs if p.request.connection == connection),
                )
            )
        if logprobs and self.log.journal is not None:
            self.log.journal.note_logprobs(logprobs)
        for end in ends:
            self._forget(end)
        self.changes.notify()

    def _forget(self, end: RequestEnd) -> None:
        request = end.request
        num_generated = self.requests.num_generated(request)
        self.log.finished(request, end.facts, end.message or request.end_message, num_generated)
        self.requests.remove(request)
        if (by_handle := self._by_handle.get(request.connection)) is not None:
            del by_handle[request.submission.handle]


def _connections_of(
    connections: Int32Array,
    ends: Sequence[RequestEnd],
    admissions: Sequence[tuple[LiveRequest, FirstAdmission]],
) -> set[int]:
    concerned = {end.request.connection for end in ends}
    concerned.update(request.connection for request, _ in admissions)
    if len(connections):
        first = int(connections[0])
        concerned.add(first)
        # Nearly always there is one router, and one comparison settles it.
        if (connections != first).any():
            concerned.update(np.unique(connections).tolist())
    return concerned
