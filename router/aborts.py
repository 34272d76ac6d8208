"""Ends requests wherever they are: in this router, in a scheduler, in another router, in the store.

Schedulers are told first, because a request that ends there ends for its caller too. Then the
record is claimed: a request that nobody runs at the moment ends in the store, and whatever runs the
request without our knowledge is fenced off by its epoch.
"""

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

from headrace.service.errors import ServiceError
from headrace.status.states import State
from headrace.status.store import StatusStore
from router import outcomes
from router.router import Router
from router.take_up import TakeUps

logger = logging.getLogger(__name__)

_MAX_CLAIMS_AT_ONCE = 16
_MAX_TRIES = 4


class AbortingScheduler(Protocol):
    """A scheduler that can be asked to end requests."""

    @property
    def name(self) -> str:
        """The scheduler's address."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> Collection[str]:
        """The requests that ended there; the scheduler tells all of its routers of the others."""
        ...


class Aborts:
    """Ends requests of any router."""

    def __init__(
        self,
        router: Router,
        take_ups: TakeUps,
        store: StatusStore,
        schedulers: Iterable[AbortingScheduler],
    ) -> None:
        self._router = router
        self._take_ups = take_ups
        self._store = store
        self._schedulers = schedulers
        self._claims = asyncio.Semaphore(_MAX_CLAIMS_AT_ONCE)

    async def end(self, request_ids: Sequence[str]) -> Mapping[str, bool | None]:
        """For each request: True if it is being ended, False if it had ended, None if unknown.

        Raises the store's ServiceError when only the store could tell.
        """
        ended = {request_id: self._router.abort(request_id) for request_id in request_ids}
        away = [request_id for request_id, found in ended.items() if found is None]
        were_live: Collection[str] = ()
        if away:
            were_live, *answered = await asyncio.gather(
                self._live(away), *(self._ask(one, away) for one in self._schedulers)
            )
            for found in answered:
                ended.update(dict.fromkeys(found, True))
        # Also those that end here or in a scheduler: whoever dies before the end is recorded would
        # leave a request that can be taken up again.
        is_there = self._store.is_durable
        live = [i for i, found in ended.items() if found is None or (found and is_there)]
        answers = await asyncio.gather(*map(self._end_in_store, live), return_exceptions=True)
        for request_id, answer in zip(live, answers, strict=True):
            if ended[request_id] is not None:
                continue
            if isinstance(answer, BaseException):
                raise answer
            # The request's own router may have heard of this abort, and recorded the end, first.
            has_ended_now = answer is False and request_id in were_live
            ended[request_id] = True if has_ended_now else answer
        return ended

    async def _live(self, request_ids: Sequence[str]) -> Collection[str]:
        """The requests that the store has as live now; none while it does not answer."""

        async def is_live(request_id: str) -> bool:
            async with self._claims:
                stored = await self._store.load(request_id)
                return stored is not None and stored.is_live

        try:
            live = await asyncio.gather(*map(is_live, request_ids))
        except ServiceError:
            return ()
        return {request_id for request_id, is_it in zip(request_ids, live, strict=True) if is_it}

    @staticmethod
    async def _ask(scheduler: AbortingScheduler, request_ids: Sequence[str]) -> Collection[str]:
        try:
            return await scheduler.abort(request_ids)
        except ServiceError as error:
            logger.info("scheduler %s was not told to abort: %s", scheduler.name, error.message)
            return ()

    async def _end_in_store(self, request_id: str) -> bool | None:
        async with self._claims:
            for _ in range(_MAX_TRIES):
                stored = await self._store.load(request_id)
                if stored is None:
                    return None
                if not stored.is_live:
                    return False
                if await self._take_ups.claim(stored, State.ABORTED, detail="aborted"):
                    return True
        raise outcomes.contested(request_id)
