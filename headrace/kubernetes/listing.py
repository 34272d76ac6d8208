"""Objects of one kind under a selector, listed again after each change.

A watch only says that it is time to list: what its events hold is never put together to a state, so
an event that was missed is made good by the next list. A watch lasts some seconds, so one that has
gone silent (a broken route, a proxy that holds it) is not believed for longer.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from headrace.kubernetes.api import Api, ApiError, Json

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.2
_MAX_RETRY_S = 5.0
# Events often come in bursts, and one list answers them all.
_GAP_S = 0.1

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Snapshot(Generic[T]):
    """What a list said, by name; the list was asked for at asked_s on the loop's clock."""

    asked_s: float
    objects: Mapping[str, T]


class Listing(Generic[T]):
    """Lists and watches objects; `read` takes from an object what counts."""

    def __init__(
        self,
        api: Api,
        path: str,
        selector: str,
        read: Callable[[Json], T | None],
        lasts_s: float,
    ) -> None:
        """read: None for an object that is of no use. lasts_s: how long a watch lasts."""
        self._api = api
        self._path = path
        self._query = {"labelSelector": selector}
        self._read = read
        self._lasts_s = lasts_s

    async def list(self) -> Snapshot[T]:
        """The objects now.

        Raises:
            ApiError: the server does not say.
        """
        return (await self._list())[0]

    async def snapshots(self) -> AsyncIterator[Snapshot[T]]:
        """The objects now, and again after each change and at the end of each watch; for ever."""
        retry_s, last_error = _FIRST_RETRY_S, ""
        while True:
            try:
                snapshot, version = await self._list()
            except ApiError as error:
                if str(error) != last_error:
                    logger.warning("cannot list %s: %s", self._path, error)
                last_error = str(error)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, _MAX_RETRY_S)
                continue
            if last_error:
                logger.info("%s can be listed again", self._path)
            retry_s, last_error = _FIRST_RETRY_S, ""
            yield snapshot
            await self._wait_for_change(snapshot, version)
            await asyncio.sleep(_GAP_S)

    async def _list(self) -> tuple[Snapshot[T], str]:
        asked_s = asyncio.get_running_loop().time()
        answer = await self._api.call("GET", self._path, query=self._query)
        read = ((item["metadata"]["name"], self._read(item)) for item in answer["items"])
        objects = {name: what for name, what in read if what is not None}
        return Snapshot(asked_s, objects), str(answer["metadata"]["resourceVersion"])

    async def _wait_for_change(self, snapshot: Snapshot[T], version: str) -> None:
        """Returns when an object counts otherwise than in the snapshot, or when the watch ends.

        Whatever ends the watch, a version that the server has forgotten (410) included, the answer
        is to list again.
        """
        query = {**self._query, "resourceVersion": version}
        began_s = asyncio.get_running_loop().time()
        events = self._api.watch(self._path, query, self._lasts_s)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if self._is_change(event, snapshot):
                        return
        except ApiError as error:
            if error.status not in {0, 410}:
                logger.warning("cannot watch %s: %s", self._path, error)
        # A server that refuses watches, or ends them at once, is not asked in a tight loop.
        if asyncio.get_running_loop().time() - began_s < _FIRST_RETRY_S:
            await asyncio.sleep(_FIRST_RETRY_S)

    def _is_change(self, event: Json, snapshot: Snapshot[T]) -> bool:
        if event["type"] == "ERROR":
            return True
        name = event["object"]["metadata"]["name"]
        is_there = event["type"] != "DELETED"
        return (self._read(event["object"]) if is_there else None) != snapshot.objects.get(name)
