"""Which worker a request is sent to, and whether any has credit for it.

Credit is late binding's other half. A worker may hold max_num_seqs requests plus a small
allowance that wait in its scheduler, so that the scheduler always has something to admit and its
own queue and preemption do their work; the rest waits here, where it can still go elsewhere. A
request that is sent counts at once, so a burst inside one load report cannot overshoot:

    slots  = max_num_seqs + waiting_allowance - (ours in flight + others', as last reported)
    blocks = free blocks, as last reported - prompt blocks of ours that the report cannot show yet

A request needs a slot, and either its prompt's blocks or a place in the waiting allowance. Output
blocks are not reserved: running out of them is what preemption is for. Among workers with credit
the one with the smallest share of its slots taken is chosen, then the one with most free blocks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from router.core.admission import Capacity


class WorkerState(Enum):
    """Whether a worker takes requests."""

    STARTING = "STARTING"
    READY = "READY"
    DRAINING = "DRAINING"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """A worker, as driven by one scheduler; incarnation is one process of it."""

    scheduler: str
    worker_id: str
    incarnation: str


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


@dataclass(slots=True)
class _Worker:
    """A report and what we have sent since; sums are over our requests in flight."""

    key: WorkerKey
    report: WorkerReport
    num_others: int = 0
    num_in_flight: int = 0
    num_not_admitted: int = 0
    num_blocks_not_admitted: int = 0
    num_blocks_not_reported: int = 0  # admitted since the report
    is_refusing: bool = False

    @property
    def num_taken(self) -> int:
        return self.num_others + self.num_in_flight

    @property
    def num_free_blocks(self) -> int:
        unseen = self.num_blocks_not_admitted + self.num_blocks_not_reported
        return self.report.num_free_kv_blocks - unseen

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // max(1, self.report.block_size))

    @property
    def capacity(self) -> Capacity:
        report = self.report
        return Capacity(report.max_model_len, report.num_kv_blocks * report.block_size)


@dataclass(slots=True)
class _Scheduler:
    reported_at: float
    is_draining: bool = False
    workers: dict[str, _Worker] = field(default_factory=dict)


class Pool:
    """Every worker known, by scheduler; the caller is its only writer."""

    def __init__(self, *, waiting_allowance: int = 8, max_report_age_s: float = 5.0) -> None:
        """A scheduler that has not reported for max_report_age_s is passed over."""
        self._waiting_allowance = waiting_allowance
        self._max_report_age_s = max_report_age_s
        self._schedulers: dict[str, _Scheduler] = {}
        self._known_models: set[str] = set()

    def report(
        self, scheduler: str, reports: Iterable[WorkerReport], *, is_draining: bool, now: float
    ) -> None:
        """Take a scheduler's view of its workers; it replaces the last one."""
        known = self._schedulers.get(scheduler)
        before = known.workers if known else {}
        workers: dict[str, _Worker] = {}
        for report in reports:
            worker = before.get(report.worker_id)
            if worker is None or worker.key.incarnation != report.incarnation:
                key = WorkerKey(scheduler, report.worker_id, report.incarnation)
                worker = _Worker(key, report)
            worker.report = report
            worker.is_refusing = False
            worker.num_blocks_not_reported = 0
            # Requests in the report that are not ours came through other routers.
            total = report.num_running + report.num_waiting
            worker.num_others = max(0, total - worker.num_in_flight)
            workers[report.worker_id] = worker
            self._known_models.add(report.model)
        self._schedulers[scheduler] = _Scheduler(now, is_draining, workers)

    def forget(self, scheduler: str) -> None:
        """The scheduler is gone, and with it all that was sent to it."""
        self._schedulers.pop(scheduler, None)

    def knows_model(self, model: str) -> bool:
        """Whether a worker has served the model since we started."""
        return model in self._known_models

    def reports(self) -> list[WorkerReport]:
        """The last report of every worker, in order of its id."""
        found = [w.report for s in self._schedulers.values() for w in s.workers.values()]
        return sorted(found, key=lambda report: report.worker_id)

    def ready(self, model: str, now: float) -> list[WorkerReport]:
        """Reports of the workers that take requests for the model."""
        return [worker.report for worker in self._ready(model, now)]

    def capacities(self, model: str, now: float) -> Sequence[Capacity]:
        """The capacities of the workers that take requests for the model."""
        return [worker.capacity for worker in self._ready(model, now)]

    def choose(
        self, model: str, *, num_prompt_tokens: int, max_tokens: int, now: float
    ) -> WorkerKey | None:
        """The best worker that has credit for such a request; None when none has."""
        best: _Worker | None = None
        for worker in self._ready(model, now):
            if num_prompt_tokens + max_tokens > worker.capacity.num_tokens:
                continue
            if not self._has_credit(worker, num_prompt_tokens):
                continue
            if best is None or _load(worker) < _load(best):
                best = worker
        return best.key if best else None

    def sent(self, key: WorkerKey, num_tokens: int) -> None:
        """A request of num_tokens (prompt and already generated) went to the worker."""
        if (worker := self._find(key)) is not None:
            worker.num_in_flight += 1
            worker.num_not_admitted += 1
            worker.num_blocks_not_admitted += worker.num_blocks(num_tokens)

    def admitted(self, key: WorkerKey, num_tokens: int) -> None:
        """The scheduler gave it KV blocks; its next report will show that."""
        if (worker := self._find(key)) is not None:
            num_blocks = worker.num_blocks(num_tokens)
            worker.num_not_admitted -= 1
            worker.num_blocks_not_admitted -= num_blocks
            worker.num_blocks_not_reported += num_blocks

    def finished(self, key: WorkerKey, num_tokens: int, *, was_admitted: bool) -> None:
        """A request that was sent there is there no more."""
        if (worker := self._find(key)) is not None:
            worker.num_in_flight -= 1
            if not was_admitted:
                worker.num_not_admitted -= 1
                worker.num_blocks_not_admitted -= worker.num_blocks(num_tokens)

    def refused(self, key: WorkerKey) -> None:
        """The worker took no request; pass it over until it is reported again."""
        if (worker := self._find(key)) is not None:
            worker.is_refusing = True

    def num_in_flight(self) -> int:
        """Requests sent and not finished, over all workers."""
        return sum(w.num_in_flight for s in self._schedulers.values() for w in s.workers.values())

    def _find(self, key: WorkerKey) -> _Worker | None:
        scheduler = self._schedulers.get(key.scheduler)
        worker = scheduler.workers.get(key.worker_id) if scheduler else None
        return worker if worker and worker.key == key else None

    def _ready(self, model: str, now: float) -> list[_Worker]:
        oldest = now - self._max_report_age_s
        return [
            worker
            for scheduler in self._schedulers.values()
            if not scheduler.is_draining and scheduler.reported_at >= oldest
            for worker in scheduler.workers.values()
            if worker.report.model == model and worker.report.state is WorkerState.READY
        ]

    def _has_credit(self, worker: _Worker, num_tokens: int) -> bool:
        limit = worker.report.max_num_seqs + self._waiting_allowance
        if worker.is_refusing or worker.num_taken >= limit:
            return False
        return (
            worker.num_blocks(num_tokens) <= worker.num_free_blocks
            or worker.num_not_admitted < self._waiting_allowance
        )


def _load(worker: _Worker) -> tuple[float, int, str]:
    """Smaller is better; the names make it the same everywhere."""
    share = worker.num_taken / max(1, worker.report.max_num_seqs)
    return (share, -worker.num_free_blocks, worker.key.worker_id)
