"""Requests whose router has gone: how far they go on, and when they end.

An orphan runs on unread until it has too many tokens, and is paused then. A router that submits the
request under a greater epoch takes it over (see `takeover`); otherwise the orphan ends.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.core.plan import RequestStatus
from scheduler.requests import NO_ROUTER, LiveRequest, LiveRequestTable

_CHECK_S = 0.25


@dataclass(frozen=True, slots=True)
class _Orphan:
    """A request that has to be taken over until expires_s; tokens beyond max_num_tokens pause it.

    expires_s is on the loop's clock; ttl_s is how long before that the router went.
    """

    request: LiveRequest
    ttl_s: float
    expires_s: float
    max_num_tokens: int


class Orphans:
    """The live requests of `requests` that no router has."""

    def __init__(
        self, requests: LiveRequestTable, *, ttl_s: float, max_num_unread_tokens: int
    ) -> None:
        """max_num_unread_tokens: an orphan with more new tokens than this is paused."""
        self._requests = requests
        self._ttl_s = ttl_s
        self._max_num_unread_tokens = max_num_unread_tokens
        self._orphans: dict[int, _Orphan] = {}
        self._has_orphans = asyncio.Event()

    def add(self, requests: Iterable[LiveRequest], ttl_s: float | None = None) -> None:
        """Watch requests that no router has from now on; ttl_s: shorter than the usual time."""
        ttl_s = self._ttl_s if ttl_s is None else min(ttl_s, self._ttl_s)
        now_s = asyncio.get_running_loop().time()
        for request in requests:
            assert request.connection == NO_ROUTER, "an orphan has a router"
            most = self._requests.num_generated(request) + self._max_num_unread_tokens
            self._orphans[request.key] = _Orphan(request, ttl_s, now_s + ttl_s, most)
        if self._orphans:
            self._has_orphans.set()

    async def run(self) -> None:
        """Pause and end orphans until cancelled."""
        while True:
            await self._has_orphans.wait()
            now_s = asyncio.get_running_loop().time()
            self._orphans = {
                key: orphan for key, orphan in self._orphans.items() if self._watch(orphan, now_s)
            }
            if self._orphans:
                await asyncio.sleep(_CHECK_S)
            else:
                self._has_orphans.clear()

    def _watch(self, orphan: _Orphan, now_s: float) -> bool:
        """Pause or end an orphan that is due; whether it is still to be watched."""
        request = orphan.request
        is_live = self._requests.get(request.key) is request
        if not is_live or request.connection != NO_ROUTER:
            return False
        if now_s >= orphan.expires_s:
            request.end_message = f"nobody resumed the request for {orphan.ttl_s:g} s"
            self._requests.release_id(request)
            request.owner.cancel(request, RequestStatus.ABORTED)
            return False
        num_generated = self._requests.num_generated(request)
        if num_generated > orphan.max_num_tokens and not request.is_paused:
            request.owner.set_paused(request, is_paused=True)
        return True
