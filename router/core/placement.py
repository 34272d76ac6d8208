"""Which worker a request is sent to.

Candidates are the workers that are ready, whose scheduler has reported lately, and that have credit
for the request (see `credit`). The cheapest candidate is chosen; cost is in steps of that worker
until the first token:

    cost = (prompt tokens not in its prefix cache + tokens sent there and not admitted yet)
               / max_num_batched_tokens
           + LOAD_STEPS * share of its slots taken

A prompt goes to the worker that caches its prefix as long as the saving outweighs the queue there.
After that the prefix is computed on another worker too, so a hot prefix spreads. The content of
a worker's cache is an estimate (see `prefix_index`). Workers of role decode get prompts only when
there are no others. A worker that was restarted (a new incarnation) starts with all its credit.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from headrace.vocabulary import WorkerRole, WorkerState
from router.core.admission import Capacity
from router.core.credit import Credit, Load, WorkerReport
from router.core.prefix_index import CHUNK_TOKENS, Prefix, PrefixIndex

# A full worker costs as much as computing this many steps of prompt.
LOAD_STEPS = 4.0

_NEVER = float("-inf"), Capacity(max_model_len=0, num_kv_blocks=0, block_size=1)


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """A worker, as driven by one scheduler; incarnation is one process of it."""

    scheduler: str
    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Need:
    """The properties of a request that placement looks at.

    num_tokens counts prompt and generated tokens, max_tokens the tokens still to come. A smaller
    urgency is more urgent.
    """

    model: str
    num_tokens: int
    max_tokens: int
    prefix: Prefix = ()
    urgency: int = 0


@dataclass(frozen=True, slots=True)
class Sent:
    """A request at a worker, for as long as the request takes credit there.

    prefix_uses: for each chunk that the index expected in the cache, the time of its last use.
    """

    worker: WorkerKey
    load: Load
    prefix_uses: Sequence[int]


@dataclass(slots=True, eq=False)
class _Worker:
    key: WorkerKey
    credit: Credit
    prefixes: PrefixIndex
    report: WorkerReport
    capacity: Capacity

    def holds(self, need: Need) -> bool:
        """Whether the worker could serve the request when empty."""
        return need.num_tokens + need.max_tokens <= self.capacity.num_tokens


@dataclass(slots=True)
class _Scheduler:
    """A scheduler's last report; ready: those of its workers that are, by model."""

    reported_at: float
    is_draining: bool
    workers: dict[str, _Worker]
    ready: dict[str, list[_Worker]]


class WorkerPool:
    """Every worker known, by scheduler; the caller is its only writer."""

    def __init__(
        self,
        *,
        waiting_allowance: int = 8,
        max_report_age_s: float = 5.0,
        worker_grace_s: float = 30.0,
    ) -> None:
        """
        Args:
            waiting_allowance: requests sent to a worker beyond its max_num_seqs.
            max_report_age_s: a scheduler that has not reported for so long gets no requests.
            worker_grace_s: for so long after its last worker, a model still counts as served.
        """
        self._waiting_allowance = waiting_allowance
        self._max_report_age_s = max_report_age_s
        self._worker_grace_s = worker_grace_s
        # By model: when a ready worker was last reported, and its capacity.
        self._last_ready: dict[str, tuple[float, Capacity]] = {}
        self._schedulers: dict[str, _Scheduler] = {}

    def report(
        self, scheduler: str, reports: Iterable[WorkerReport], *, is_draining: bool, now: float
    ) -> None:
        """Replace a scheduler's last report of its workers."""
        known = self._schedulers.get(scheduler)
        before = known.workers if known else {}
        workers: dict[str, _Worker] = {}
        ready: dict[str, list[_Worker]] = {}
        for report in reports:
            capacity = report.capacity
            worker = before.get(report.worker_id)
            if worker is None or worker.key.incarnation != report.incarnation:
                key = WorkerKey(scheduler, report.worker_id, report.incarnation)
                credit = Credit(report, self._waiting_allowance)
                prefixes = PrefixIndex(capacity.num_kv_tokens)
                worker = _Worker(key, credit, prefixes, report, capacity)
            worker.report, worker.capacity = report, capacity
            worker.credit.reported(report)
            workers[report.worker_id] = worker
            if report.state is WorkerState.READY:
                ready.setdefault(report.model, []).append(worker)
                self._last_ready[report.model] = now, capacity
        self._schedulers[scheduler] = _Scheduler(now, is_draining, workers, ready)

    def forget(self, scheduler: str) -> bool:
        """Remove a scheduler, with all requests sent to it; returns whether it was draining."""
        known = self._schedulers.pop(scheduler, None)
        return known is not None and known.is_draining

    def reports(self) -> list[WorkerReport]:
        """The last report of every worker, in order of its id."""
        found = [w.report for s in self._schedulers.values() for w in s.workers.values()]
        return sorted(found, key=lambda report: report.worker_id)

    def ready(self, model: str, now: float) -> list[WorkerReport]:
        """Reports of the workers that take requests for the model."""
        return [worker.report for worker in self._ready(model, now)]

    def capacities(self, model: str, now: float) -> Sequence[Capacity]:
        """The capacities of the workers that take requests for the model.

        While a scheduler or the only worker is replaced there is none; until worker_grace_s have
        passed, the last one's capacity stands for those to come, so that requests may queue.
        """
        if ready := self._ready(model, now):
            return [worker.capacity for worker in ready]
        was_ready_at, capacity = self._last_ready.get(model, _NEVER)
        return [capacity] if now - was_ready_at <= self._worker_grace_s else []

    def holders(self, need: Need, now: float) -> set[WorkerKey]:
        """The workers that take requests and could serve this request when empty."""
        return {worker.key for worker in self._ready(need.model, now) if worker.holds(need)}

    def choose(self, need: Need, now: float, closed: Container[WorkerKey] = ()) -> WorkerKey | None:
        """The cheapest worker with credit that is not closed; None when there is none."""
        best, best_cost = None, None
        for worker in self._ready(need.model, now):
            if worker.key in closed or not worker.holds(need):
                continue
            if not worker.credit.allows(need.num_tokens, need.urgency):
                continue
            cost = _cost(worker, need)
            if best_cost is None or cost < best_cost:
                best, best_cost = worker.key, cost
        return best

    def key_of(self, scheduler: str, worker_id: str) -> WorkerKey | None:
        """A worker by its name, whether or not it takes new requests."""
        known = self._schedulers.get(scheduler)
        worker = known.workers.get(worker_id) if known else None
        return None if worker is None else worker.key

    def send(self, key: WorkerKey, need: Need) -> Sent:
        """Count a request as sent to the worker."""
        worker = self._find(key)
        assert worker is not None, "requests are sent to workers that were chosen"
        uses = worker.prefixes.uses(need.prefix)
        worker.prefixes.use(need.prefix)
        num_new_tokens = max(1, need.num_tokens - len(uses) * CHUNK_TOKENS)
        load = Load(need.num_tokens, num_new_tokens, need.urgency)
        worker.credit.take(load)
        return Sent(key, load, uses)

    def admitted(self, sent: Sent, num_cached_tokens: int) -> None:
        """The scheduler gave the request KV blocks, and found so many of its tokens cached."""
        worker = self._find(sent.worker)
        if worker is None:
            return
        worker.credit.admitted(sent.load)
        missing = sent.prefix_uses[num_cached_tokens // CHUNK_TOKENS :]
        if missing:
            worker.prefixes.drop_used_until(missing[0])

    def paused(self, sent: Sent) -> None:
        """An admitted request was paused: it takes no slot until it continues."""
        if (worker := self._find(sent.worker)) is not None:
            worker.credit.pause(sent.load)

    def continued(self, sent: Sent) -> None:
        """A paused request takes a slot again, whether or not a slot is free."""
        if (worker := self._find(sent.worker)) is not None:
            worker.credit.go_on(sent.load)

    def finished(self, sent: Sent, *, was_admitted: bool) -> None:
        """A request that was sent there has left the worker."""
        if (worker := self._find(sent.worker)) is not None:
            worker.credit.give_back(sent.load, was_admitted=was_admitted)

    def refused(self, key: WorkerKey) -> None:
        """The worker refused a request; send nothing there until its next report."""
        if (worker := self._find(key)) is not None:
            worker.credit.is_refusing = True

    def num_in_flight(self) -> int:
        """Requests sent and not finished, over all workers."""
        workers = [w for s in self._schedulers.values() for w in s.workers.values()]
        return sum(worker.credit.num_in_flight for worker in workers)

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
            for worker in scheduler.ready.get(model, ())
        ]
        return [worker for worker in ready if worker.report.role is not WorkerRole.DECODE] or ready


def _cost(worker: _Worker, need: Need) -> tuple[float, int, str]:
    """The smallest is chosen; ties go to more free blocks, then to the name."""
    credit, report = worker.credit, worker.report
    num_cached = worker.prefixes.num_matched(need.prefix) * CHUNK_TOKENS if need.prefix else 0
    num_ahead = need.num_tokens - num_cached + credit.num_waiting_tokens
    share = credit.num_taken / max(1, report.max_num_seqs)
    steps = num_ahead / max(1, report.max_num_batched_tokens) + LOAD_STEPS * share
    return (steps, -credit.num_free_blocks, worker.key.worker_id)
