"""One router's stream without the wire format: submissions in, updates out."""

import logging

from headrace.vocabulary import RefusalReason
from scheduler import takeover
from scheduler.core.plan import RequestStatus
from scheduler.orphans import Orphans
from scheduler.outbox import RouterOutbox
from scheduler.pool import Pool
from scheduler.requests import Submission
from scheduler.switchboard import Switchboard
from scheduler.updates import NotTaken, RouterUpdate

logger = logging.getLogger(__name__)


class RouterConnection:
    """Opened with a router's stream, closed with it."""

    def __init__(
        self,
        router_id: str,
        switchboard: Switchboard,
        pool: Pool,
        orphans: Orphans,
        *,
        max_waiting_tokens: int,
    ) -> None:
        self.router_id = router_id
        self._switchboard = switchboard
        self._pool = pool
        self._orphans = orphans
        self._outbox = RouterOutbox(max_waiting_tokens)
        self._number = switchboard.open(self._outbox)

    def submit(self, submission: Submission) -> None:
        """Submit a request to a worker's engine, take it over where it lives, or refuse it."""
        handle = submission.handle
        if self._switchboard.find(self._number, handle) is not None:
            why = f"handle {handle} is in use"
            self.refuse(NotTaken(handle, RefusalReason.DUPLICATE, why))
            return
        older = self._switchboard.requests.find(submission.request_id)
        if older is not None:
            if (duplicate := takeover.refusal(submission, older)) is not None:
                self.refuse(duplicate)
                return
            if takeover.take_over(self._switchboard, self._number, submission, older):
                self._switchboard.log.taken_over(older, self.router_id)
                return
        engine = self._pool.choose(submission)
        if isinstance(engine, NotTaken):
            self.refuse(engine)
            return
        request = self._switchboard.add(self._number, submission, engine)
        if submission.epoch > 1:
            self._switchboard.log.taken_up(request, self.router_id)
        engine.submit(request)

    def refuse(self, refusal: NotTaken) -> None:
        """Refuse a submission."""
        self._switchboard.tell(self._number, RouterUpdate(refusals=(refusal,)))

    def cancel(self, handle: int, status: RequestStatus, detail: str = "") -> None:
        """End a request; no effect on a request that has ended."""
        if (request := self._switchboard.find(self._number, handle)) is not None:
            # The id is free from now on: a router may reuse it before the engine gets to this.
            self._switchboard.requests.release_id(request)
            request.end_message = detail
            request.owner.cancel(request, status)

    def set_paused(self, handle: int, *, is_paused: bool) -> None:
        """Pause or continue a request; no effect on a request that has ended."""
        if (request := self._switchboard.find(self._number, handle)) is not None:
            request.owner.set_paused(request, is_paused=is_paused)

    def release(self, handle: int) -> None:
        """Let go of a request that the router has learnt is another's."""
        if (request := self._switchboard.find(self._number, handle)) is not None:
            takeover.set_aside(self._switchboard, self._orphans, request)

    async def take(self) -> RouterUpdate:
        """The next update for the router; see RouterOutbox.take."""
        return await self._outbox.take()

    async def wait_overflow(self) -> None:
        """Return once too much waits for the router; see RouterOutbox.wait_overflow."""
        await self._outbox.wait_overflow()

    def finish(self) -> None:
        """Let `take` return what waits, then raise OutboxClosedError."""
        self._outbox.close()

    def close(self) -> None:
        """Leave the router's requests as orphans."""
        requests = self._switchboard.close(self._number)
        self._orphans.add(requests)
        logger.info("router %s left; %d of its requests live", self.router_id, len(requests))
