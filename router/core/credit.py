"""Whether a worker has credit for a request.

A worker may hold max_num_seqs requests plus a small allowance that wait in its scheduler, so that
the scheduler always has a request to admit. All other requests wait in the router, which can still
send them to another worker. A request counts from the moment it is sent, so that a burst between
two reports of a worker cannot overshoot:

    slots  = max_num_seqs + waiting_allowance
             - (requests of this router in flight + requests of other routers, as last reported)
    blocks = free blocks, as last reported
             - prompt blocks of this router's requests that the report cannot show yet

A request needs a slot, and either the blocks of its prompt or room in the waiting allowance. Output
blocks are not reserved; the scheduler preempts when they run out.

Where the scheduler displaces by priority, less urgent requests of this router give way to a more
urgent request: they count neither as slots taken nor as waiting before the urgent request. So an
urgent request is sent although the slots are full, but at most max_num_seqs beyond them, because
that many requests can give way. Requests of other routers count as equally urgent: the reports do
not tell their priorities.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from headrace.vocabulary import WorkerRole, WorkerState
from router.core.admission import Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker's capacity and load, as its scheduler reports them."""

    worker_id: str
    incarnation: str
    model: str
    state: WorkerState
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    vocab_size: int
    num_free_kv_blocks: int
    num_running: int
    num_waiting: int
    max_num_batched_tokens: int = 2048
    role: WorkerRole = WorkerRole.MIXED
    displaces_by_priority: bool = False

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.max_model_len, self.num_kv_blocks, self.block_size)


@dataclass(frozen=True, slots=True)
class Load:
    """The load that a request puts on a worker: all its tokens, and the tokens not cached there.

    A smaller urgency is more urgent.
    """

    num_tokens: int
    num_new_tokens: int
    urgency: int = 0


class Credit:
    """A worker's last report and the requests that this router has in flight there."""

    def __init__(self, report: WorkerReport, waiting_allowance: int) -> None:
        """waiting_allowance: requests that may wait in the scheduler."""
        self.report = report
        self.is_refusing = False
        self.num_waiting_tokens = 0
        self._allowance = waiting_allowance
        self._num_others = 0
        self._num_waiting_blocks = 0
        self._num_blocks_not_reported = 0  # of requests admitted since the report
        self._urgencies: list[int] = []  # sorted
        self._waiting_urgencies: list[int] = []  # of requests not admitted yet, sorted

    @property
    def num_in_flight(self) -> int:
        return len(self._urgencies)

    @property
    def num_taken(self) -> int:
        """Slots taken."""
        return self._num_others + len(self._urgencies)

    @property
    def num_free_blocks(self) -> int:
        unseen = self._num_waiting_blocks + self._num_blocks_not_reported
        return self.report.num_free_kv_blocks - unseen

    def reported(self, report: WorkerReport) -> None:
        """Take a new report of the same incarnation."""
        self.report = report
        self.is_refusing = False
        self._num_blocks_not_reported = 0
        # The other requests in the report came through other routers.
        self._num_others = max(0, report.num_running + report.num_waiting - self.num_in_flight)

    def allows(self, num_tokens: int, urgency: int = 0) -> bool:
        """Whether a request of so many tokens, prompt and already generated, may be sent."""
        if self.is_refusing:
            return False
        slots = self.report.max_num_seqs + self._allowance
        has_blocks = self._num_blocks(num_tokens) <= self.num_free_blocks
        if not self._gives_way(urgency):
            has_place = has_blocks or len(self._waiting_urgencies) < self._allowance
            return has_place and self.num_taken < slots
        num_before = self._num_others + bisect_right(self._urgencies, urgency)
        num_waiting_before = bisect_right(self._waiting_urgencies, urgency)
        return (
            (has_blocks or num_waiting_before < max(1, self._allowance))
            and num_before < slots
            and self.num_taken < slots + self.report.max_num_seqs
        )

    def take(self, load: Load) -> None:
        """Count a request that was sent."""
        insort(self._urgencies, load.urgency)
        self._wait(load, 1)

    def admitted(self, load: Load) -> None:
        """The scheduler gave the request KV blocks; its next report will show that."""
        self._wait(load, -1)
        self._num_blocks_not_reported += self._num_blocks(load.num_tokens)

    def pause(self, load: Load) -> None:
        """An admitted request was paused: it takes no slot until it continues."""
        _remove(self._urgencies, load.urgency)

    def go_on(self, load: Load) -> None:
        """A paused request takes a slot again, whether or not a slot is free."""
        insort(self._urgencies, load.urgency)

    def give_back(self, load: Load, *, was_admitted: bool) -> None:
        """The request has left the worker."""
        _remove(self._urgencies, load.urgency)
        if not was_admitted:
            self._wait(load, -1)

    def _gives_way(self, urgency: int) -> bool:
        """Whether a request of this router would give way to a request of this urgency."""
        is_more_urgent = bool(self._urgencies) and self._urgencies[-1] > urgency
        return is_more_urgent and self.report.displaces_by_priority

    def _wait(self, load: Load, sign: int) -> None:
        if sign > 0:
            insort(self._waiting_urgencies, load.urgency)
        else:
            _remove(self._waiting_urgencies, load.urgency)
        self.num_waiting_tokens += sign * load.num_new_tokens
        self._num_waiting_blocks += sign * self._num_blocks(load.num_tokens)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // max(1, self.report.block_size))


def _remove(values: list[int], value: int) -> None:
    at = bisect_left(values, value)
    assert values[at] == value, "only a taken urgency is given back"
    del values[at]
