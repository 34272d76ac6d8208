"""Which processes live, and which requests live where.

A process holds a lease while it lives. Each run of a router has a set of its live requests, so that
the requests of a dead router are found without reading those of living ones. The sets are hints:
a record says what is true. Members that are wrong are removed: by readers from the sets of
the dead, and by each living router from its own.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from headrace.service.errors import ServiceError
from headrace.status.connect import Command, Connection
from headrace.status.keys import Keys
from headrace.status.records import Record, Update
from headrace.status.scripts import HOLD_LEASE, read_script
from headrace.status.states import State
from headrace.status.wire import decode_records

logger = logging.getLogger(__name__)

LEASE_TTL_S = 10.0
_LEASE_PERIOD_S = 3.0
_LEASE_RETRY_S = 1.0
# A missing lease proves a death only after every living process had time to renew its own since
# the store was last away or, by any call of ours, failed over.
_GRACE_S = LEASE_TTL_S
_PAGE = 128


@dataclass(frozen=True, slots=True)
class _Page:
    """Members of a set: the records of the right ones, and the wrong ones. Cursor 0 is the end."""

    next_cursor: int
    right: list[list[Record]]
    wrong: list[str]


class LiveIndex:
    """Leases and the sets of live requests. Calls raise ServiceError while the store is away."""

    def __init__(
        self, connection: Connection, keys: Keys, *, ttl_s: float, clock: Callable[[], float]
    ) -> None:
        """ttl_s: how long a set is kept after its last change; clock: monotonic seconds."""
        self._connection = connection
        self._call = connection.call
        self._hold = connection.add_script(HOLD_LEASE)
        self._read = connection.add_script(read_script())
        self._keys = keys
        self._ttl_ms = int(ttl_s * 1000)
        self._clock = clock
        self._holds_since: float | None = None
        # Where `_tidy` goes on, and the members that were wrong in the last round and in this one.
        self._cursor = 0
        self._suspects: set[str] = set()
        self._new_suspects: set[str] = set()

    async def hold(self, role: str, name: str, incarnation: str) -> NoReturn:
        """Keeps a lease until cancelled; a process that starts later takes it over."""
        is_first, has_warned = True, False
        while True:
            held = await self._renew(role, name, incarnation, is_first=is_first)
            if held is None:
                self._holds_since = None
            elif self._holds_since is None:
                self._holds_since = self._clock()
            if held:
                is_first = False
                if role == "router":
                    await self._tidy((name, incarnation))
            elif held is False and not has_warned:
                has_warned = True
                logger.error(
                    "another %s runs under the name %r, so this one counts as dead: give each a"
                    " name of its own",
                    role,
                    name,
                )
            period_s = _LEASE_RETRY_S if held is None else _LEASE_PERIOD_S
            await asyncio.sleep(period_s * random.uniform(0.8, 1.0))  # noqa: S311

    async def _renew(
        self, role: str, name: str, incarnation: str, *, is_first: bool
    ) -> bool | None:
        """Whether the lease is held now; None: the store is away."""
        commands = [
            self._hold.call(
                [self._keys.lease(role, name)],
                *(incarnation, str(int(LEASE_TTL_S * 1000)), "1" if is_first else ""),
            )
        ]
        if role == "router":
            commands += self._touch(name, incarnation)
        try:
            return bool((await self._call(*commands))[0])
        except ServiceError as error:
            logger.debug("lease of %s %s: %s", role, name, error.message)
            return None

    async def incarnation_of(self, role: str, name: str) -> str:
        """The incarnation that holds a lease; "" when no process does."""
        (holder,) = await self._call(("GET", self._keys.lease(role, name)))
        return holder.decode() if holder else ""

    async def is_dead(self, role: str, name: str, incarnation: str) -> bool:
        """Whether a process is surely dead; false in doubt. An empty incarnation is any of it."""
        holder = await self.incarnation_of(role, name)
        if holder:
            return bool(incarnation) and holder != incarnation
        if self._holds_since is None:
            return False
        since = max(self._holds_since, self._connection.failed_at)
        return self._clock() - since >= _GRACE_S

    def additions(self, updates: Sequence[Update]) -> list[Command]:
        """Commands that enter new requests into their routers' sets."""
        members: dict[tuple[str, str], list[str]] = {}
        for update in updates:
            name, hash_sign, index = update.request_id.partition("#")
            if update.state is State.QUEUED and (not hash_sign or index == "0"):
                owner = update.router_id or "", update.router_incarnation or ""
                members.setdefault(owner, []).append(_member(name, update.create_time_unix_s))
        return [command for owner, added in members.items() for command in self._add(*owner, added)]

    def removals(self, ended: Sequence[tuple[str, str, str]]) -> list[Command]:
        """Commands that remove requests that ended, each as router, its incarnation and member."""
        members: dict[tuple[str, str], list[str]] = {}
        for router_id, incarnation, member in ended:
            members.setdefault((router_id, incarnation), []).append(member)
        return [("SREM", self._keys.live(*owner), *gone) for owner, gone in members.items()]

    async def enter(self, owner: tuple[str, str], member: str) -> None:
        """Enters a request into the set of the router that is about to claim it."""
        await self._call(*self._add(*owner, [member]))

    async def requests(self, *, of_the_dead: bool) -> AsyncIterator[list[Record]]:
        """The records of each live request; only of requests whose router is dead if asked."""
        (routers,) = await self._call(("SMEMBERS", self._keys.routers()))
        for name in routers:
            incarnation, _, router_id = name.decode().partition(" ")
            is_dead = await self.is_dead("router", router_id, incarnation)
            if of_the_dead and not is_dead:
                continue
            has_members = False
            cursor = -1
            while cursor:
                page = await self._page((router_id, incarnation), max(cursor, 0))
                cursor = page.next_cursor
                has_members = has_members or bool(page.right or page.wrong)
                for records in page.right:
                    yield records
                if is_dead and page.wrong:
                    await self._call(("SREM", self._keys.live(router_id, incarnation), *page.wrong))
            if is_dead and not has_members:
                await self._call(("SREM", self._keys.routers(), name))

    async def _tidy(self, owner: tuple[str, str]) -> None:
        """Looks at some members of this router's own set, and removes what is wrong.

        Members are written before records, so only those are removed that were wrong before, too.
        """
        with contextlib.suppress(ServiceError):
            page = await self._page(owner, self._cursor)
            gone = self._suspects.intersection(page.wrong)
            if gone:
                await self._call(("SREM", self._keys.live(*owner), *gone))
            self._new_suspects.update(set(page.wrong) - gone)
            self._cursor = page.next_cursor
            if not page.next_cursor:
                self._suspects, self._new_suspects = self._new_suspects, set()

    async def _page(self, owner: tuple[str, str], cursor: int) -> "_Page":
        """Some members of a router's set, from `cursor` on."""
        command = ("SSCAN", self._keys.live(*owner), cursor, "COUNT", _PAGE)
        ((next_cursor, found),) = await self._call(command)
        members = [member.decode() for member in found]
        page = _Page(int(next_cursor), [], [])
        if not members:
            return page
        ids = [member.partition(" ")[0] for member in members]
        answers = await self._call(*(self._read.call([self._keys.spec(i)], "") for i in ids))
        for request_id, member, answer in zip(ids, members, answers, strict=True):
            records = decode_records(request_id, answer)
            if records and _is_live_with(records, member, owner):
                page.right.append(records)
            else:
                page.wrong.append(member)
        return page

    def _add(self, router_id: str, incarnation: str, members: Sequence[str]) -> list[Command]:
        return [
            ("SADD", self._keys.live(router_id, incarnation), *members),
            ("SADD", self._keys.routers(), f"{incarnation} {router_id}"),
            *self._touch(router_id, incarnation),
        ]

    def _touch(self, router_id: str, incarnation: str) -> list[Command]:
        return [
            ("PEXPIRE", self._keys.live(router_id, incarnation), self._ttl_ms),
            ("PEXPIRE", self._keys.routers(), self._ttl_ms),
        ]


def member_of(request_id: str, create_time: str) -> str:
    """A request's name in a set; with the arrival, because an id can be used again."""
    return f"{request_id} {create_time}"


def _member(request_id: str, create_time_unix_s: float | None) -> str:
    return member_of(request_id, "" if create_time_unix_s is None else str(create_time_unix_s))


def _is_live_with(records: Sequence[Record], member: str, owner: tuple[str, str]) -> bool:
    """Whether a request lives and belongs to a router. A router that claims a request enters the
    request into its own set first."""
    living = [record for record in records if not record.state.is_final]
    created = member.partition(" ")[2]
    return (
        bool(living)
        and created in {"", str(records[0].create_time_unix_s)}
        and (living[0].router_id, living[0].router_incarnation) == owner
    )
