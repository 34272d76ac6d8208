"""Updates to the status store, its answers, and its records."""

from dataclasses import dataclass
from enum import StrEnum

from headrace.status.states import State


class Verdict(StrEnum):
    """What became of an update."""

    APPLIED = "APPLIED"
    # The record has this state and epoch already; numbers of a live one were refreshed.
    REPEATED = "REPEATED"
    # Another writer's change has to come first.
    EARLY = "EARLY"
    # A later dispatch has taken the request over.
    STALE = "STALE"
    # The table does not have it.
    ILLEGAL = "ILLEGAL"


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """A verdict, and what the record said before; state None: there was none, epoch 0."""

    verdict: Verdict
    state: State | None
    epoch: int

    @property
    def is_written(self) -> bool:
        return self.verdict in {Verdict.APPLIED, Verdict.REPEATED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A change of state; fields that are None stay as they are in the record.

    time_unix_s is when it happened. create_time_unix_s is when the request arrived, the same in all
    of its updates: it tells requests apart that use one id after each other.
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
    """A request's record. Times are seconds since the epoch of Unix; unknown texts are ""."""

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
