"""One router's stream, without the wire: what it submits and cancels, what it is sent."""

import logging

from headrace.vocabulary import RefusalReason
from scheduler.core.plan import RequestStatus
from scheduler.outbox import RouterOutbox
from scheduler.pool import Pool
from scheduler.requests import Submission
from scheduler.switchboard import Switchboard
from scheduler.updates import NotTaken, RouterUpdate

logger = logging.getLogger(__name__)


class RouterConnection:
    """Opened when a router calls, closed when its stream ends, whatever ended it."""

    def __init__(
        self, router_id: str, switchboard: Switchboard, pool: Pool, *, max_waiting_tokens: int
    ) -> None:
        self.router_id = router_id
        self._switchboard = switchboard
        self._pool = pool
        self._outbox = RouterOutbox(max_waiting_tokens)
        self._number = switchboard.open(self._outbox)

    def submit(self, submission: Submission) -> None:
        """Give a request to a worker, or answer why not."""
        engine = self._duplicate(submission) or self._pool.choose(submission)
        if isinstance(engine, NotTaken):
            self.refuse(engine)
            return
        engine.submit(self._switchboard.add(self._number, submission, engine))

    def refuse(self, refusal: NotTaken) -> None:
        """Answer that a submission was not even understood."""
        self._switchboard.refuse(self._number, refusal)

    def cancel(self, handle: int, status: RequestStatus) -> None:
        """End a request; nothing happens if it has ended."""
        if (request := self._switchboard.find(self._number, handle)) is not None:
            # The id is free from now on: a router may reuse it before the engine gets to this.
            self._switchboard.requests.release_id(request)
            request.home.cancel(request, status)

    def set_paused(self, handle: int, *, is_paused: bool) -> None:
        """Set a request aside or let it go on; nothing happens if it has ended."""
        if (request := self._switchboard.find(self._number, handle)) is not None:
            request.home.set_paused(request, is_paused=is_paused)

    async def take(self) -> RouterUpdate:
        """What to send next; waits for it. See RouterOutbox.take."""
        return await self._outbox.take()

    async def wait_overflow(self) -> None:
        """Return once the router is too slow to be served. See RouterOutbox.wait_overflow."""
        await self._outbox.wait_overflow()

    def finish(self) -> None:
        """Let `take` give what waits, then fail with OutboxClosedError."""
        self._outbox.close()

    def close(self) -> None:
        """End every request that came through here."""
        requests = self._switchboard.close(self._number)
        for request in requests:
            self._switchboard.requests.release_id(request)
            request.home.cancel(request, RequestStatus.ABORTED)
        logger.info("router %s left; ended %d requests", self.router_id, len(requests))

    def _duplicate(self, submission: Submission) -> NotTaken | None:
        """A refusal if its handle or id lives; an older epoch of the id gives way."""
        if self._switchboard.find(self._number, submission.handle) is not None:
            return NotTaken(
                submission.handle, RefusalReason.DUPLICATE, f"handle {submission.handle} is in use"
            )
        older = self._switchboard.requests.find(submission.request_id)
        if older is None:
            return None
        if submission.epoch <= older.submission.epoch:
            return NotTaken(
                submission.handle,
                RefusalReason.DUPLICATE,
                f"{submission.request_id} runs here under epoch {older.submission.epoch}",
            )
        self._switchboard.requests.release_id(older)
        older.home.cancel(older, RequestStatus.ABORTED)
        return None
