"""Requests whose services are dead: found in the store, claimed, and finished without a caller.

A request whose router is dead goes on in its scheduler, until somebody resumes the request or gives
up. This router takes such a request up by itself in three cases: the request is to be finished
whether or not somebody reads it; its scheduler is dead too, and it has a deadline; or its scheduler
is dead too, and its router was this router before a restart, so everything has restarted. Any
number of routers may look at once: a claim has one winner.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence

from headrace.service.errors import ServiceError
from headrace.status.records import Record, Stored
from headrace.status.states import State
from headrace.status.store import StatusStore
from router.request import Spec
from router.revival import Origin
from router.router import Router
from router.status_log import Identity
from router.take_up import TakeUps

logger = logging.getLogger(__name__)

_MIN_GAP_S = 2.0
_MAX_GAP_S = 5.0
# A router that died just after it recorded a dispatch may not have sent the request.
_UNSENT_AFTER_S = 10.0
_MAX_REMEMBERED = 100_000


class Recovery:
    """Looks for lost requests, again and again."""

    def __init__(
        self,
        router: Router,
        take_ups: TakeUps,
        store: StatusStore,
        *,
        identity: Identity,
        max_recoveries: int,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """A request that was recovered max_recoveries times and lost again fails."""
        self._router = router
        self._take_ups = take_ups
        self._store = store
        self._identity = identity
        self._max_recoveries = max_recoveries
        self._wall_clock = wall_clock
        # Requests at epochs that wait for somebody to resume them: for good, or as long as their
        # scheduler lives.
        self._waiting: set[tuple[str, int]] = set()
        self._running: set[tuple[str, int]] = set()

    async def run(self) -> None:
        """Look until cancelled; a store that is away is looked at again later."""
        while self._store.is_configured:
            await asyncio.sleep(random.uniform(_MIN_GAP_S, _MAX_GAP_S))  # noqa: S311
            if self._router.is_draining:
                return
            try:
                await self.sweep()
            except ServiceError as error:
                logger.debug("no look for lost requests: %s", error.message)
            except Exception:
                # A record that finds a bug must not end the router, here and after each restart.
                logger.exception("the look for lost requests failed")

    async def sweep(self) -> None:
        """Take up what is lost now."""
        await self._look_at_doubts()
        async for records in self._store.orphans():
            living = [record for record in records if not record.state.is_final]
            if not living or self._router.calls.get(_request_id(living[0])):
                continue
            known = _request_id(living[0]), max(record.epoch for record in living)
            is_lost = await self._is_lost(living)
            if known in self._waiting or (known in self._running and not is_lost):
                continue
            stored = await self._store.load(known[0])
            if stored is None or _owners(stored) != {_owner(record) for record in living}:
                continue  # another router was faster
            await self._consider(stored, living, known, is_lost=is_lost)

    async def _look_at_doubts(self) -> None:
        """Take up what an unanswered claim has made this router's.

        Nobody else would: the request's router lives.
        """
        in_doubt = self._take_ups.in_doubt
        for request_id, epochs in list(in_doubt.items()):
            stored = await self._store.load(request_id)
            is_here = self._router.calls.get(request_id) is not None
            if stored is None or not stored.is_live or is_here:
                in_doubt.pop(request_id, None)
            elif stored.epochs != epochs:
                living = [c.record for c in stored.completions if not c.record.state.is_final]
                if self._is_ours(living):
                    known = request_id, max(stored.epochs)
                    await self._consider(stored, living, known, is_lost=await self._is_lost(living))
                else:
                    in_doubt.pop(request_id, None)
            # Else the claim may yet come.

    def _is_ours(self, living: Sequence[Record]) -> bool:
        us = self._identity.router_id, self._identity.incarnation
        return all((record.router_id, record.router_incarnation) == us for record in living)

    async def _consider(
        self, stored: Stored, living: Sequence[Record], known: tuple[str, int], *, is_lost: bool
    ) -> None:
        """Take up or fail a request whose router is dead, or remember that it waits."""
        try:
            origin = self._take_ups.decode(stored)
        except ServiceError as error:
            if error.reason == "UNKNOWN_MODEL":
                self._remember(self._waiting, known)
            elif is_lost:
                await self._fail(stored, error.message)
            return
        if not is_lost and not origin.spec.recovers_at_once:
            self._remember(self._running, known)
        elif not self._is_wanted(origin.spec, living):
            self._remember(self._waiting, known)
        elif max(record.num_recoveries for record in living) >= self._max_recoveries:
            await self._fail(stored, f"its services died {self._max_recoveries + 1} times")
        else:
            await self._recover(stored, origin)

    @staticmethod
    def _remember(requests: set[tuple[str, int]], known: tuple[str, int]) -> None:
        if len(requests) >= _MAX_REMEMBERED:
            requests.clear()
        requests.add(known)

    async def _recover(self, stored: Stored, origin: Origin) -> None:
        try:
            self._router.check_take_up(origin.spec.tenant)
        except ServiceError:
            return  # until there is room
        claimed = await self._take_ups.claim(stored, State.QUEUED, is_recovery=True)
        if claimed is not None:
            tokenizer = self._take_ups.tokenizer(origin)
            self._router.recover(self._take_ups.decode(claimed), tokenizer)
            logger.info("recovered %s", stored.request_id, extra={"request_id": stored.request_id})

    async def _fail(self, stored: Stored, why: str) -> None:
        ids = {"request_id": stored.request_id}
        logger.warning("%s is given up: %s", stored.request_id, why, extra=ids)
        await self._take_ups.claim(stored, State.ERROR, detail=why)

    async def _is_lost(self, living: Sequence[Record]) -> bool:
        """Whether no scheduler has the request any more."""
        return all([await self._is_without_scheduler(record) for record in living])

    async def _is_without_scheduler(self, record: Record) -> bool:
        if not record.scheduler_id or record.state is State.QUEUED:
            return True
        age_s = self._wall_clock() - record.update_time_unix_s
        if record.state is State.DISPATCHED and age_s > _UNSENT_AFTER_S:
            return True
        incarnation = record.scheduler_incarnation
        return await self._store.is_dead("scheduler", record.scheduler_id, incarnation)

    def _is_wanted(self, spec: Spec, living: Sequence[Record]) -> bool:
        """Whether a lost request is taken up before somebody resumes it."""
        was_ours = any(record.router_id == self._identity.router_id for record in living)
        has_deadline = spec.deadline_unix_s is not None and not spec.is_calls_deadline
        return spec.recovers_at_once or has_deadline or was_ours


def _request_id(record: Record) -> str:
    return record.request_id.partition("#")[0]


def _owners(stored: Stored) -> set[tuple[str, str, int]]:
    """The routers that have a request's completions, and the epochs; none of those that ended."""
    return {_owner(c.record) for c in stored.completions if not c.record.state.is_final}


def _owner(record: Record) -> tuple[str, str, int]:
    return record.router_id, record.router_incarnation, record.epoch
