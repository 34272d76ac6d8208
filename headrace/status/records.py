"""What the store is told of a request, what the store answers, and what the store holds."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from headrace.status.states import State

MAX_COMPLETIONS = 16
# The only completion of a request has the request's id for a name; one of several has "ID#k".
# The id of a request that was made with a tenant's key is TENANT/ID.
_NAME = re.compile(r"((?:[A-Za-z0-9._-]{1,64}/)?[A-Za-z0-9._:-]{1,128})(?:#([0-9]{1,2}))?")


@lru_cache(maxsize=8192)
def parse_name(name: str) -> tuple[str, int]:
    """The request id and the index in the name of a completion; ValueError for another text."""
    matched = _NAME.fullmatch(name)
    if matched is None or (index := int(matched[2] or 0)) >= MAX_COMPLETIONS:
        raise ValueError(f"not a request id: {name!r}")
    return matched[1], index


class Verdict(StrEnum):
    """The store's verdict on an update or on a piece of the journal."""

    APPLIED = "APPLIED"
    # The record already has this state and epoch; the numbers of a live record were refreshed.
    REPEATED = "REPEATED"
    # Another writer's transition must be applied first.
    EARLY = "EARLY"
    # The request was taken up again or ended by another owner, or its id was used again.
    STALE = "STALE"
    # The transition is not in the table.
    ILLEGAL = "ILLEGAL"
    # Tokens before the piece are missing.
    GAP = "GAP"
    # Another program uses one of the request's keys.
    BROKEN = "BROKEN"


@dataclass(frozen=True, slots=True)
class WriteOutcome:
    """A verdict, and the record's state and epoch before; None and 0 when there was no record.

    num_tokens is how many tokens the journal has; only set for GAP. is_superseded: STALE because
    the request was taken up again or ended, not because its id was used again.
    """

    verdict: Verdict
    state: State | None = None
    epoch: int = 0
    num_tokens: int = 0
    is_superseded: bool = False

    @property
    def is_written(self) -> bool:
        return self.verdict in {Verdict.APPLIED, Verdict.REPEATED}


@dataclass(frozen=True, slots=True)
class Superseded:
    """What was recorded under `epoch` is refused, because another owner has taken the completion up
    or ended it; `state` is what the store has."""

    name: str
    epoch: int
    state: State

    @property
    def is_aborted(self) -> bool:
        return self.state is State.ABORTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A change of state; a field that is None leaves the record's field unchanged.

    time_unix_s is the time of the change. create_time_unix_s is the completion's arrival, the same
    in all of its updates: the arrival distinguishes successive requests that reuse one id.
    spec is what any router needs to take the request up again, the same for all completions.
    """

    request_id: str
    state: State
    time_unix_s: float
    epoch: int = 1
    create_time_unix_s: float | None = None
    spec: bytes | None = None
    num_completions: int | None = None
    tenant: str | None = None
    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    stop_token_id: int | None = None
    detail: str | None = None
    router_id: str | None = None
    router_incarnation: str | None = None
    scheduler_id: str | None = None
    scheduler_incarnation: str | None = None
    worker_id: str | None = None
    worker_incarnation: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A piece of a completion's journal: the tokens from `position` on.

    token_ids are int32, little-endian. logprobs has an encoded entry for each token, or none at
    all; prompt_logprobs come with the first piece.
    """

    request_id: str
    epoch: int
    create_time_unix_s: float | None
    position: int
    token_ids: bytes
    logprobs: Sequence[bytes] = ()
    prompt_logprobs: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A completion's record. Times are Unix seconds; unknown texts are "".

    num_recoveries counts how often a router took the request up on its own. journal_tokens is how
    many tokens the journal has, where the whole request was read.
    """

    request_id: str
    state: State
    epoch: int
    create_time_unix_s: float
    update_time_unix_s: float
    num_completions: int = 1
    tenant: str = ""
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    stop_token_id: int | None = None
    detail: str = ""
    router_id: str = ""
    router_incarnation: str = ""
    scheduler_id: str = ""
    scheduler_incarnation: str = ""
    worker_id: str = ""
    worker_incarnation: str = ""
    num_recoveries: int = 0
    journal_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCompletion:
    """A completion's record and journal; token_ids are int32, little-endian."""

    record: Record
    token_ids: bytes = b""
    logprobs: Sequence[bytes] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @property
    def is_complete(self) -> bool:
        """Whether the journal has every token of a completion that has ended."""
        record = self.record
        return record.state.is_final and self.num_tokens >= record.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """All that the store holds of a request.

    spec is empty if the spec was too large to keep or is lost. completions are in order of their
    index. A completion without a record (its router died before writing one) has epoch 0.
    """

    request_id: str
    spec: bytes
    completions: Sequence[StoredCompletion]
    prompt_logprobs: Sequence[bytes] = field(default=())

    @property
    def is_live(self) -> bool:
        """Whether any completion has not ended."""
        return any(not c.record.state.is_final for c in self.completions)

    @property
    def epochs(self) -> tuple[int, ...]:
        """The epoch of each completion; a claim raises those of completions that live."""
        return tuple(c.record.epoch for c in self.completions)


class JournalSource(Protocol):
    """Where a writer's journal comes from. No call waits; all are made on the event loop."""

    def take(self) -> Sequence[Tokens | Update]:
        """What came since the last call: of each completion its tokens, then its final update."""

    def again(self, request_id: str, epoch: int, position: int) -> Tokens | None:
        """All tokens of a completion from `position` on, if they are still known here."""
        ...


OnSuperseded = Callable[[Sequence[Superseded]], None]
