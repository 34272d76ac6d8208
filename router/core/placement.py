"""Which worker a request is sent to, and whether any has credit for it.

Credit is late binding's other half. A worker may hold max_num_seqs requests plus a small
allowance that wait in its scheduler, so that the scheduler always has something to admit and its
own queue and preemption do their work; the rest waits here, where it can still go elsewhere. A
request that is sent counts at once, so a burst inside one load report cannot overshoot:

    slots  = max_num_seqs + waiting_allowance - (ours in flight + others', as last reported)
    blocks = free blocks, as last reported - prompt blocks of ours that the report cannot show yet

A request needs a slot, and either its prompt's blocks or a place in the waiting allowance. Output
blocks are not reserved: running out of them is what preemption is for.

Among workers with credit the cheapest is chosen, in steps of that worker until the first token:

    cost = (prompt tokens not in its prefix cache + those sent there and not admitted yet)
               / max_num_batched_tokens
           + LOAD_STEPS * share of its slots taken

A prompt goes where its prefix is for as long as what it saves outweighs the queue there; then it
is computed again elsewhere, which is how a hot prefix spreads. What is in a worker's cache is
guessed (see `prefix_index`). Workers whose role is decode get prompts only when there are no
others.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from router.core.admission import Capacity
from router.core.prefix_index import CHUNK_TOKENS, Prefix, PrefixIndex

# A full worker costs as much as computing this many steps of prompt.
LOAD_STEPS = 4.0


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
    max_num_batched_tokens: int = 2048
    role: Role = Role.MIXED


@dataclass(frozen=True, slots=True)
class Sent:
    """A request at a worker, for as long as it takes credit there.

    num_tokens are prompt and already generated ones; prefix_uses says when each chunk that we
    thought cached was last used there.
    """

    worker: WorkerKey
    num_tokens: int
    num_new_tokens: int
    prefix_uses: Sequence[int]


@dataclass(slots=True)
class _Worker:
    """A report and what we have sent since; sums are over our requests in flight."""

    key: WorkerKey
    report: WorkerReport
    prefixes: PrefixIndex
    num_others: int = 0
    num_in_flight: int = 0
    num_not_admitted: int = 0
    num_tokens_not_admitted: int = 0
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
                num_kv_tokens = report.num_kv_blocks * report.block_size
                worker = _Worker(key, report, PrefixIndex(num_kv_tokens))
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
        self,
        model: str,
        *,
        num_prompt_tokens: int,
        max_tokens: int,
        now: float,
        prefix: Prefix = (),
    ) -> WorkerKey | None:
        """The cheapest worker that has credit for such a request; None when none has."""
        best, best_cost = None, None
        for worker in self._ready(model, now):
            if num_prompt_tokens + max_tokens > worker.capacity.num_tokens:
                continue
            if not self._has_credit(worker, num_prompt_tokens):
                continue
            cost = _cost(worker, num_prompt_tokens, prefix)
            if best_cost is None or cost < best_cost:
                best, best_cost = worker.key, cost
        return best

    def send(self, key: WorkerKey, num_tokens: int, prefix: Prefix = ()) -> Sent:
        """Count a request of num_tokens (prompt and already generated) as sent to the worker."""
        worker = self._find(key)
        assert worker is not None, "requests are sent to workers that were chosen"
        uses = worker.prefixes.uses(prefix)
        sent = Sent(key, num_tokens, max(1, num_tokens - len(uses) * CHUNK_TOKENS), uses)
        worker.prefixes.use(prefix)
        worker.num_in_flight += 1
        self._wait(worker, sent, 1)
        return sent

    def admitted(self, sent: Sent, num_cached_tokens: int) -> None:
        """The scheduler gave it KV blocks; its next report will show that."""
        worker = self._find(sent.worker)
        if worker is None:
            return
        self._wait(worker, sent, -1)
        worker.num_blocks_not_reported += worker.num_blocks(sent.num_tokens)
        missing = sent.prefix_uses[num_cached_tokens // CHUNK_TOKENS :]
        if missing:
            worker.prefixes.drop_used_until(missing[0])

    def paused(self, sent: Sent) -> None:
        """An admitted request has been set aside there: it takes no slot until it goes on."""
        if (worker := self._find(sent.worker)) is not None:
            worker.num_in_flight -= 1

    def continued(self, sent: Sent) -> None:
        """It wants a slot again, whether or not one is free."""
        if (worker := self._find(sent.worker)) is not None:
            worker.num_in_flight += 1

    def finished(self, sent: Sent, *, was_admitted: bool) -> None:
        """A request that was sent there is there no more."""
        if (worker := self._find(sent.worker)) is not None:
            worker.num_in_flight -= 1
            if not was_admitted:
                self._wait(worker, sent, -1)

    def refused(self, key: WorkerKey) -> None:
        """The worker took no request; pass it over until it is reported again."""
        if (worker := self._find(key)) is not None:
            worker.is_refusing = True

    def num_in_flight(self) -> int:
        """Requests sent and not finished, over all workers."""
        return sum(w.num_in_flight for s in self._schedulers.values() for w in s.workers.values())

    @staticmethod
    def _wait(worker: _Worker, sent: Sent, sign: int) -> None:
        """Count a request that waits there for admission, or no longer."""
        worker.num_not_admitted += sign
        worker.num_tokens_not_admitted += sign * sent.num_new_tokens
        worker.num_blocks_not_admitted += sign * worker.num_blocks(sent.num_tokens)

    def _find(self, key: WorkerKey) -> _Worker | None:
        scheduler = self._schedulers.get(key.scheduler)
        worker = scheduler.workers.get(key.worker_id) if scheduler else None
        return worker if worker and worker.key == key else None

    def _ready(self, model: str, now: float) -> list[_Worker]:
        oldest = now - self._max_report_age_s
        ready = [
            worker
            for scheduler in self._schedulers.values()
            if not scheduler.is_draining and scheduler.reported_at >= oldest
            for worker in scheduler.workers.values()
            if worker.report.model == model and worker.report.state is WorkerState.READY
        ]
        return [worker for worker in ready if worker.report.role is not Role.DECODE] or ready

    def _has_credit(self, worker: _Worker, num_tokens: int) -> bool:
        limit = worker.report.max_num_seqs + self._waiting_allowance
        if worker.is_refusing or worker.num_taken >= limit:
            return False
        return (
            worker.num_blocks(num_tokens) <= worker.num_free_blocks
            or worker.num_not_admitted < self._waiting_allowance
        )


def _cost(worker: _Worker, num_tokens: int, prefix: Prefix) -> tuple[float, int, str]:
    """Smaller is better; equal ones are told apart by free blocks and by name."""
    num_cached = worker.prefixes.num_matched(prefix) * CHUNK_TOKENS if prefix else 0
    num_ahead = num_tokens - num_cached + worker.num_tokens_not_admitted
    share = worker.num_taken / max(1, worker.report.max_num_seqs)
    steps = num_ahead / max(1, worker.report.max_num_batched_tokens) + LOAD_STEPS * share
    return (steps, -worker.num_free_blocks, worker.key.worker_id)
