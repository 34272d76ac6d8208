"""Updates to the status store, its answers, and its records."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.status.states import State


class Verdict(StrEnum):
    """The store's verdict on an update."""

    APPLIED = "APPLIED"
    # The record already has this state and epoch; the numbers of a live record were refreshed.
    REPEATED = "REPEATED"
    # Another writer's transition must be applied first.
    EARLY = "EARLY"
    # The record has a greater epoch: the request was dispatched again.
    STALE = "STALE"
    # The transition is not in the table.
    ILLEGAL = "ILLEGAL"


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """A verdict, and the record's state and epoch before; None and 0 when there was no record."""

    verdict: Verdict
    state: State | None
    epoch: int

    @property
    def is_written(self) -> bool:
        return self.verdict in {Verdict.APPLIED, Verdict.REPEATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A change of state; a field that is None leaves the record's field unchanged.

    time_unix_s is the time of the change. create_time_unix_s is the request's arrival, the same in
    all of its updates: the arrival distinguishes successive requests that reuse one id.
    """

    request_id: str
    state: State
    time_unix_s: float
    epoch: int = 1
    create_time_unix_s: float | None = None
    tenant: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    detail: str | None = None
    router_id: str | None = None
    scheduler_id: str | None = None
    worker_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A request's record. Times are Unix seconds; unknown texts are ""."""

    request_id: str
    state: State
    epoch: int
    create_time_unix_s: float
    update_time_unix_s: float
    tenant: str = ""
    model: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    detail: str = ""
    router_id: str = ""
    scheduler_id: str = ""
    worker_id: str = ""
