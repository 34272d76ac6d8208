"""Whether a worker has credit for a request.

Credit is late binding's other half. A worker may hold max_num_seqs requests plus a small
allowance that wait in its scheduler, so that the scheduler always has something to admit and its
own queue and preemption do their work; the rest waits here, where it can still go elsewhere. A
request that is sent counts at once, so a burst inside one load report cannot overshoot:

    slots  = max_num_seqs + waiting_allowance - (ours in flight + others', as last reported)
    blocks = free blocks, as last reported - prompt blocks of ours that the report cannot show yet

A request needs a slot, and either its prompt's blocks or a place in the waiting allowance. Output
blocks are not reserved: running out of them is what preemption is for.

Where the scheduler displaces by priority, ours that are less urgent give way: for a more urgent
request they count neither as slots taken nor as waiting before it. So it is sent although the
slots are full, but never more than max_num_seqs beyond them, which is how many can give way. Those
of other routers count as equally urgent, as nobody tells us.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from enum import Enum

from router.core.admission import Capacity


class WorkerState(Enum):
    """Whether a worker takes requests."""

    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    LOST = "LOST"


class Role(Enum):
    """What a worker is for."""

    MIXED = "MIXED"
    PREFILL = "PREFILL"
    DECODE = "DECODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a scheduler says of a worker."""

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
    role: Role = Role.MIXED
    displaces_by_priority: bool = False

    @property
    def capacity(self) -> Capacity:
        return Capacity(self.max_model_len, self.num_kv_blocks, self.block_size)


@dataclass(frozen=True, slots=True)
class Load:
    """What a request takes: all its tokens, those not cached there, and how urgent it is.

    Smaller is more urgent.
    """

    num_tokens: int
    num_new_tokens: int
    urgency: int = 0


class Credit:
    """A worker's last report, and what we have sent there since; sums are over ours in flight."""

    def __init__(self, report: WorkerReport, waiting_allowance: int) -> None:
        """waiting_allowance requests may wait in the scheduler."""
        self.report = report
        self.is_refusing = False
        self.num_waiting_tokens = 0
        self._allowance = waiting_allowance
        self._num_others = 0
        self._num_waiting_blocks = 0
        self._num_blocks_not_reported = 0  # of those admitted since the report
        self._urgencies: list[int] = []  # sorted
        self._waiting_urgencies: list[int] = []  # of those not admitted yet, sorted

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
        # Requests in the report that are not ours came through other routers.
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
        """A request was sent."""
        insort(self._urgencies, load.urgency)
        self._wait(load, 1)

    def admitted(self, load: Load) -> None:
        """The scheduler gave it KV blocks; its next report will show that."""
        self._wait(load, -1)
        self._num_blocks_not_reported += self._num_blocks(load.num_tokens)

    def pause(self, load: Load) -> None:
        """An admitted one was set aside: it takes no slot until it goes on."""
        _remove(self._urgencies, load.urgency)

    def go_on(self, load: Load) -> None:
        """It wants a slot again, whether or not one is free."""
        insort(self._urgencies, load.urgency)

    def give_back(self, load: Load, *, was_admitted: bool) -> None:
        """It is there no more."""
        _remove(self._urgencies, load.urgency)
        if not was_admitted:
            self._wait(load, -1)

    def _gives_way(self, urgency: int) -> bool:
        """Whether one of ours there would give way to it."""
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
    assert values[at] == value, "what is given back was taken"
    del values[at]
