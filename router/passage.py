"""Where a completion's time goes in its router, and how that and the scheduler's part add up.

A completion is in one stage at a time. While a scheduler has the completion, the scheduler knows
more: its account takes the place of the stage DISPATCHED, and what is left of that is the network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from router.core.admission import QueueLoad

# Stands for tenants that are not named.
ALL_OTHERS = "*"

_MAX_TENANTS = 8
# Beyond so many tenants, to name the largest would cost each request too much.
_MAX_SORTED = 64
_ORDER = ("TOKENIZE", "QUEUE", "WAIT", "PREFILL", "DECODE", "PREEMPTED", "PAUSED", "RECOVERED")


class Stage(Enum):
    """What a completion does, as its router sees it; the values are the names on the wire."""

    TOKENIZE = "TOKENIZE"
    EARLIER = "OTHER"  # what was before a router took the request up
    QUEUE = "QUEUE"
    DISPATCHED = ""
    WAIT = "WAIT"
    PREFILL = "PREFILL"
    DECODE = "DECODE"
    PAUSED = "PAUSED"
    RECOVERED = "RECOVERED"
    ENDED = "ENDED"


@dataclass(frozen=True, slots=True)
class Load:
    """What waits in the queue for a tenant."""

    tenant: str
    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a completion's time; cause is a wait's, if it is known."""

    stage: str
    seconds: float
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Account:
    """A completion's time in its router."""

    arrived_unix_s: float
    total_s: float
    spent_s: Mapping[Stage, float]
    queued_with: Sequence[Load]


@dataclass(frozen=True, slots=True)
class SchedulerAccount:
    """A scheduler's part of the time, from when it got the completion, on its clock.

    is_first: no other scheduler had the completion before. is_continued: routers changed, and the
    scheduler had the completion all along.
    """

    shares: Sequence[Share]
    began_unix_s: float
    is_first: bool
    is_continued: bool


class Passage:
    """Seconds by stage, from a completion's arrival to its end, on the router's monotonic clock."""

    __slots__ = ("_arrived", "_queued_with", "_since", "_spent_s", "_stage")

    def __init__(self, arrived: float, *, is_taken_up: bool) -> None:
        self._arrived = self._since = arrived
        self._stage = Stage.EARLIER if is_taken_up else Stage.TOKENIZE
        self._spent_s: dict[Stage, float] = {}
        self._queued_with: Sequence[Load] | None = None

    def queue(self, waiting: Mapping[str, QueueLoad], tenant: str, now: float) -> None:
        """The completion is queued; waiting is the load of each tenant in the queue."""
        if self._queued_with is None:
            self._queued_with = _loads(waiting, tenant) if len(waiting) <= _MAX_SORTED else ()
        is_lost = self._stage is Stage.EARLIER
        self.enter(Stage.RECOVERED if is_lost else Stage.QUEUE, now)

    def enter(self, stage: Stage, now: float) -> None:
        """Begin another stage. A lost completion that is queued again is still being recovered."""
        if self._stage is Stage.ENDED or (self._stage is Stage.RECOVERED and stage is Stage.QUEUE):
            return
        self._spend(self._stage, now)
        self._stage = stage

    def lose(self, admitted: float | None, first_token: float | None, now: float) -> None:
        """The scheduler that has the completion was lost, and its account with it.

        admitted and first_token are when the router heard of them, if it has.
        """
        if self._stage is not Stage.DISPATCHED:
            return
        for stage, end in ((Stage.WAIT, admitted), (Stage.PREFILL, first_token)):
            self._spend(stage, now if end is None else min(end, now))
            if end is None:
                break
        self._spend(Stage.DECODE, now)
        self._stage = Stage.RECOVERED

    def account(self, arrived_unix_s: float, now: float) -> Account:
        """The completion's time up to its end, or up to now."""
        spent = dict(self._spent_s)
        end = self._since if self._stage is Stage.ENDED else max(now, self._since)
        spent[self._stage] = spent.get(self._stage, 0.0) + end - self._since
        return Account(
            arrived_unix_s=arrived_unix_s,
            total_s=end - self._arrived,
            spent_s=spent,
            queued_with=self._queued_with or (),
        )

    def _spend(self, stage: Stage, now: float) -> None:
        if now > self._since:
            self._spent_s[stage] = self._spent_s.get(stage, 0.0) + now - self._since
            self._since = now


def _loads(by_tenant: Mapping[str, QueueLoad], tenant: str) -> list[Load]:
    """The largest loads, and a tenant's own; the rest is summed up as ALL_OTHERS."""
    loads = [Load(name, load.num_requests, load.num_tokens) for name, load in by_tenant.items()]
    loads.sort(key=lambda load: (load.tenant != tenant, -load.num_tokens))
    return [*loads[:_MAX_TENANTS], *merged(loads[_MAX_TENANTS:])]


def merged(loads: Sequence[Load]) -> list[Load]:
    """One load of all tenants, if there are any."""
    if not loads:
        return []
    num_requests = sum(load.num_requests for load in loads)
    return [Load(ALL_OTHERS, num_requests, sum(load.num_tokens for load in loads))]


def breakdown(account: Account, scheduler: SchedulerAccount | None) -> list[Share]:
    """Shares of a completion's time that add up to account.total_s, in the order of a life.

    Durations come from two clocks: where the scheduler counts more than there is, its largest
    shares are cut, and OTHER is never negative.
    """
    hidden = {Stage.EARLIER, Stage.DISPATCHED, Stage.ENDED}
    own = {stage: s for stage, s in account.spent_s.items() if stage not in hidden}
    theirs = list(scheduler.shares) if scheduler else []
    num_theirs_s = sum(share.seconds for share in theirs)
    if scheduler and scheduler.is_continued:
        # The scheduler's account covers what this router took for a loss.
        own = {stage: s for stage, s in own.items() if stage is Stage.TOKENIZE}
        if scheduler.is_first:
            before_s = scheduler.began_unix_s - account.arrived_unix_s
            room_s = account.total_s - num_theirs_s
            own[Stage.QUEUE] = max(0.0, min(before_s, room_s) - sum(own.values()))
    room_s = max(0.0, account.total_s - sum(own.values()))
    seconds_of = {(stage.value, ""): seconds for stage, seconds in own.items()}
    for share in _cut(theirs, num_theirs_s - room_s):
        place = (share.stage, share.cause)
        seconds_of[place] = seconds_of.get(place, 0.0) + share.seconds
    other_s = max(0.0, account.total_s - sum(seconds_of.values()))
    rank = {stage: i for i, stage in enumerate(_ORDER)}
    in_order = sorted(seconds_of, key=lambda place: rank.get(place[0], len(rank)))
    shares = [Share(stage, seconds_of[stage, cause], cause) for stage, cause in in_order]
    return [share for share in (*shares, Share("OTHER", other_s)) if share.seconds > 0]


def _cut(shares: Sequence[Share], excess_s: float) -> list[Share]:
    """Shares less an excess, which is taken from the largest."""
    seconds = [share.seconds for share in shares]
    for i in sorted(range(len(shares)), key=lambda i: -seconds[i]):
        taken_s = min(max(0.0, excess_s), seconds[i])
        seconds[i] -= taken_s
        excess_s -= taken_s
    return [replace(share, seconds=s) for share, s in zip(shares, seconds, strict=True)]
