"""The request ids in use, with the permit that each holds.

An id is in use from the arrival of its call until its request is closed or released. A request may
go on without a call: when its caller is gone and wants it kept, or when it was recovered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.service.errors import ServiceError
from router import outcomes
from router.gate import Gate
from router.passage import Account
from router.request import ClientRequest

_MAX_REMEMBERED = 20_000


@dataclass(slots=True, eq=False)
class Reservation:
    """A request id in use.

    request is None until the prompt is tokenized; error is why a request that comes later is
    refused. is_over: the id is free, or another's, though the call may still be answered.
    """

    request_id: str
    tenant: str
    arrived: float
    arrived_unix_s: float
    body_sha256: bytes = b""
    request: ClientRequest | None = None
    error: ServiceError | None = None
    is_over: bool = False


class Calls:
    """Reservations by id; the router is the only writer."""

    def __init__(
        self, gate: Gate, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        """clock is monotonic, wall_clock since the epoch; both in seconds."""
        self._gate = gate
        self._clock = clock
        self._wall_clock = wall_clock
        self._by_id: dict[str, Reservation] = {}
        # The scheduler of each, and where its time went.
        self._ended: OrderedDict[str, tuple[str, Account]] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Reservation]:
        return iter(list(self._by_id.values()))

    def get(self, request_id: str) -> Reservation | None:
        """The reservation of an id in use."""
        return self._by_id.get(request_id)

    def enter(self, request_id: str, tenant: str, body_sha256: bytes) -> Reservation:
        """Reserve an id for a call whose prompt is read now, or raise."""
        if request_id in self._by_id:
            raise outcomes.duplicate(request_id)
        self._gate.enter(tenant)
        return self._add(request_id, tenant, body_sha256)

    def enter_again(self, request_id: str, tenant: str, body_sha256: bytes) -> Reservation:
        """Reserve the id of a request that was admitted before; the id must be free."""
        self._gate.enter_again(tenant)
        return self._add(request_id, tenant, body_sha256)

    def leave(self, reservation: Reservation) -> None:
        """The reservation is over: free its id, and give its permit back."""
        del self._by_id[reservation.request_id]
        reservation.is_over = True
        if reservation.request is None:
            self._gate.stop_reading(reservation.tenant)
        self._gate.leave(reservation.tenant)
        if not self._by_id:
            self._idle.set()

    def remember(self, request: ClientRequest) -> None:
        """Know for a while that a request has ended here, and what `Explain` asks for."""
        account = self._account_of(request)
        self._ended[request.spec.request_id] = (_scheduler_of(request), account)
        if len(self._ended) > _MAX_REMEMBERED:
            self._ended.popitem(last=False)

    def has_ended(self, request_id: str) -> bool:
        """Whether a request of this id has ended here."""
        return request_id in self._ended

    def scheduler_of(self, request_id: str) -> str | None:
        """The scheduler that has, or last had, the request; None if it never reached one."""
        reservation = self._by_id.get(request_id)
        if reservation is not None:
            return _scheduler_of(reservation.request) or None
        ended = self._ended.get(request_id)
        return ended[0] or None if ended is not None else None

    def account(self, request_id: str) -> Account | None:
        """Where the time of a request went here, of several completions the first's."""
        reservation = self._by_id.get(request_id)
        if reservation is None:
            ended = self._ended.get(request_id)
            return ended[1] if ended is not None else None
        return self._account_of(reservation.request) if reservation.request else None

    def _account_of(self, request: ClientRequest) -> Account:
        return request.completions[0].passage.account(request.arrived_unix_s, self._clock())

    async def wait_idle(self) -> None:
        """Return once no id is in use."""
        await self._idle.wait()

    def _add(self, request_id: str, tenant: str, body_sha256: bytes) -> Reservation:
        now, unix_s = self._clock(), self._wall_clock()
        reservation = Reservation(request_id, tenant, now, unix_s, body_sha256)
        self._by_id[request_id] = reservation
        self._ended.pop(request_id, None)
        self._idle.clear()
        return reservation


def _scheduler_of(request: ClientRequest | None) -> str:
    """The scheduler that last had a completion of the request; "" if none did."""
    links = [c.link for c in request.completions if c.link is not None] if request else []
    return links[0].name if links else ""
