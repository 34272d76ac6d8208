"""The requests that live in this scheduler, whichever worker runs them.

Decides the key of each request and which request an id or a key means. The routing columns lie
here: where a step's news of a request goes, looked up for a whole step at once. Knows nothing of
scheduling and nothing of the wire.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler.core.explain import HistoryEvent, RequestExplanation
from scheduler.core.plan import EMPTY_INT32, Int32Array, Int64Array, RequestStatus

UInt32Array = NDArray[np.uint32]

# The connection of a request that no router reads.
NO_ROUTER = 0

_NO_JOURNAL = np.iinfo(np.int64).max

# A key is a slot of the columns below plus a count that makes the key unique for ever: a plan in
# flight may name a request whose slot is used by another request already.
_SLOT_BITS = 24
_SLOT_MASK = (1 << _SLOT_BITS) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as a router hands it over, validated.

    prompt_token_ids and generated_token_ids are [num_tokens]; the latter were generated (and
    delivered) under an earlier epoch. sampling is the worker's business: only the wire looks
    inside. largest_token_ids has the largest token id of each field that names any, since a
    worker's vocabulary must hold them. Times are seconds since the epoch. history is of earlier
    epochs.
    """

    handle: int
    request_id: str
    prompt_token_ids: Int32Array
    max_tokens: int
    sampling: object
    largest_token_ids: Mapping[str, int] = field(default_factory=dict)
    model: str = ""
    worker_id: str = ""
    epoch: int = 1
    generated_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    wants_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    priority: int = 0
    arrival_time: float = 0.0
    deadline: float | None = None
    cache_salt: str = ""
    tenant: str = ""
    traceparent: str = ""
    history: tuple[HistoryEvent, ...] = ()


def largest_id(token_ids: Int32Array) -> int:
    """The largest of some token ids; above 2**31 - 1 if one is negative. token_ids is not empty."""
    return int(np.maximum.reduce(token_ids.view(np.uint32)))


class RequestOwner(Protocol):
    """What has a request now: a worker's engine, or the pool while no worker has the request."""

    def output_token_ids(self, request: "LiveRequest", start: int = 0) -> Int32Array | None:
        """[num_tokens] published so far, from position `start` on; None if they are lost."""

    def cancel(self, request: "LiveRequest", status: RequestStatus) -> None:
        """End `request` soon; the end is published as any other."""

    def explain(self, request: "LiveRequest") -> RequestExplanation | None:
        """What the owner has done with `request`; None where it has done nothing."""

    def set_paused(self, request: "LiveRequest", *, is_paused: bool) -> None:
        """Pause `request` soon, because its client does not read, or continue it."""


@dataclass(frozen=True, slots=True)
class FirstAdmission:
    """When a request got KV blocks for the first time, in seconds since the epoch, and where."""

    num_cached_tokens: int
    time_s: float
    worker_id: str


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from submission to its end; changed by its owner, or when a router takes it over.

    Args:
        connection: the router's, or NO_ROUTER.
        generated_token_ids: [num_tokens] what the owner starts from; grows only with a new owner.
        num_losses: workers that died while they had the request.
        is_admitted: a plan has admitted it.
        admission: the first one, once its router was told.
        is_paused: what its router wants.
        is_superseded: it goes on under a greater epoch elsewhere; nothing of it is recorded.
        past: what happened under earlier workers and epochs, if anything did.
        is_recovering: its worker was lost, and no other has admitted it since.
        end_message: why it is being ended, for a person.
    """

    key: int
    connection: int
    submission: Submission
    owner: RequestOwner
    generated_token_ids: Int32Array
    num_losses: int = 0
    is_admitted: bool = False
    admission: FirstAdmission | None = None
    is_paused: bool = False
    is_superseded: bool = False
    past: RequestExplanation | None = None
    is_recovering: bool = False
    end_message: str = ""
    prompt_logprobs: list[object] = field(default_factory=list)
    has_sent_prompt_logprobs: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the owner starts from."""
        return len(self.submission.prompt_token_ids) + len(self.generated_token_ids)


class LiveRequestTable:
    """All live requests by key and by id, with their routing columns."""

    def __init__(self, initial_capacity: int = 256) -> None:
        self._requests: list[LiveRequest | None] = [None] * initial_capacity
        self._connections: Int32Array = np.zeros(initial_capacity, dtype=np.int32)  # [capacity]
        self._handles: UInt32Array = np.zeros(initial_capacity, dtype=np.uint32)  # [capacity]
        self._num_generated: Int64Array = np.zeros(initial_capacity, dtype=np.int64)  # [capacity]
        # [capacity] generated tokens that the journal has taken; _NO_JOURNAL where it takes none.
        self._num_journaled: Int64Array = np.full(initial_capacity, _NO_JOURNAL)
        self._free_slots = deque(range(initial_capacity))
        self._num_added = 0
        self._by_id: dict[str, LiveRequest] = {}
        self._num_live = 0

    def __len__(self) -> int:
        return self._num_live

    def __iter__(self) -> Iterator[LiveRequest]:
        return (request for request in self._requests if request is not None)

    def add(self, connection: int, submission: Submission, owner: RequestOwner) -> LiveRequest:
        """Give a submission its key. Its id must not be live."""
        assert submission.request_id not in self._by_id, "a request id lives twice"
        if not self._free_slots:
            self._grow()
        slot = self._free_slots.popleft()
        self._num_added += 1
        request = LiveRequest(
            key=(self._num_added << _SLOT_BITS) | slot,
            connection=connection,
            submission=submission,
            owner=owner,
            generated_token_ids=submission.generated_token_ids,
        )
        self._requests[slot] = request
        self._connections[slot] = connection
        self._handles[slot] = submission.handle
        self._num_generated[slot] = len(submission.generated_token_ids)
        self._num_journaled[slot] = len(submission.generated_token_ids)
        self._by_id[submission.request_id] = request
        self._num_live += 1
        return request

    def route(self, request: LiveRequest, connection: int, handle: int) -> None:
        """Send what comes of a request to another router from now on, or to NO_ROUTER."""
        slot = request.key & _SLOT_MASK
        assert self._requests[slot] is request, "only a live request has a route"
        request.connection = connection
        self._connections[slot] = connection
        self._handles[slot] = handle

    def remove(self, request: LiveRequest) -> None:
        """Unregister a request that ended."""
        slot = request.key & _SLOT_MASK
        assert self._requests[slot] is request, "a request was removed twice"
        self._requests[slot] = None
        self._num_journaled[slot] = _NO_JOURNAL
        self._free_slots.append(slot)
        self.release_id(request)
        self._num_live -= 1

    def release_id(self, request: LiveRequest) -> None:
        """Let the id be used again before the request has ended."""
        request_id = request.submission.request_id
        if self._by_id.get(request_id) is request:
            del self._by_id[request_id]

    def get(self, key: int) -> LiveRequest | None:
        """The request of a key, unless it ended."""
        request = self._requests[key & _SLOT_MASK]
        return request if request is not None and request.key == key else None

    def find(self, request_id: str) -> LiveRequest | None:
        """The live request of an id."""
        return self._by_id.get(request_id)

    def routes(self, keys: Int64Array) -> tuple[Int32Array, UInt32Array]:
        """Connection and handle of each key, [num_keys]."""
        slots = keys & _SLOT_MASK
        return self._connections[slots], self._handles[slots]

    def count_tokens(self, keys: Int64Array, num_new_tokens: Int32Array) -> None:
        """Add to what each request has generated; both are [num_keys], keys are distinct."""
        self._num_generated[keys & _SLOT_MASK] += num_new_tokens

    def num_generated(self, request: LiveRequest) -> int:
        """Tokens of a live request that were generated so far, under earlier epochs too."""
        return int(self._num_generated[request.key & _SLOT_MASK])

    def num_journaled(self, request: LiveRequest) -> int:
        """Tokens of a live request that the journal has taken."""
        return int(self._num_journaled[request.key & _SLOT_MASK])

    def note_journaled(self, request: LiveRequest, num_tokens: int | None) -> None:
        """Note how many of a request's tokens the journal has; None: it takes no more of them."""
        slot = request.key & _SLOT_MASK
        self._num_journaled[slot] = _NO_JOURNAL if num_tokens is None else num_tokens

    def to_journal(self, first: int, max_num: int) -> tuple[list[LiveRequest], int]:
        """At most max_num requests with tokens that the journal lacks, and the next call's `first`.

        Slots are looked at in turn, from `first` on, so that each request has its turn.
        """
        slots = np.flatnonzero(self._num_generated > self._num_journaled)
        chosen = np.roll(slots, -int(np.searchsorted(slots, first)))[:max_num].tolist()
        requests = [request for slot in chosen if (request := self._requests[slot]) is not None]
        return requests, chosen[-1] + 1 if chosen else first

    def _grow(self) -> None:
        old = len(self._requests)
        assert old * 2 <= _SLOT_MASK + 1, "more requests than keys can tell apart"
        self._requests.extend([None] * old)
        self._connections = np.concatenate([self._connections, np.zeros(old, dtype=np.int32)])
        self._handles = np.concatenate([self._handles, np.zeros(old, dtype=np.uint32)])
        self._num_generated = np.concatenate([self._num_generated, np.zeros(old, dtype=np.int64)])
        self._num_journaled = np.concatenate([self._num_journaled, np.full(old, _NO_JOURNAL)])
        self._free_slots.extend(range(old, 2 * old))
