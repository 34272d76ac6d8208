"""The scheduler's metrics: what each is, how steps are counted, and how all are read at once."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headrace.service.metrics import (
    STEP_BOUNDS_S,
    Labels,
    Metric,
    Points,
    Reading,
    Recorder,
    counter,
    gauge,
    histogram,
)
from headrace.status import metrics as store_metrics
from headrace.status.store import StatusStore
from headrace.vocabulary import WorkerState
from scheduler.core.plan import NO_FACTS, Int32Array, RequestStatus, StepFacts, StepPlan
from scheduler.core.scheduler import SchedulerCore
from scheduler.step_feed import WAIT_REASONS, OpenStep, StepFeed, waiting_by_reason

if TYPE_CHECKING:
    from scheduler.engine import WorkerEngine
    from scheduler.in_flight import InFlight
    from scheduler.pool import Pool
    from scheduler.request_log import RequestLog

_WORKER = ("worker", "model")

STEP_DURATION = histogram(
    "headrace.step.duration",
    "s",
    "From when a worker could begin with a step until its result came; count is the steps.",
    _WORKER,
    bounds=STEP_BOUNDS_S,
)
STEP_GAP = histogram(
    "headrace.step.gap",
    "s",
    "From a result until the next plan, where the worker had none and requests could run: the"
    " pipeline's bubbles, which are the scheduler's time between steps.",
    _WORKER,
    bounds=STEP_BOUNDS_S,
)
STEP_TOKENS = counter(
    "headrace.step.tokens",
    "{token}",
    "The token budget of all steps, by use: prefill, decode, speculative (drafts) and idle.",
    (*_WORKER, "use"),
    vllm="iteration_tokens_total",
)
GENERATED_TOKENS = counter(
    "headrace.step.generated",
    "{token}",
    "Tokens that requests kept of the steps' results.",
    _WORKER,
)
RUNNING = gauge(
    "headrace.requests.running",
    "{request}",
    "Requests that hold a row of the worker.",
    _WORKER,
    vllm="num_requests_running",
)
WAITING = gauge(
    "headrace.requests.waiting",
    "{request}",
    "Requests sent to the worker that hold no row, by what the last step's plan says of them.",
    (*_WORKER, "reason"),
    vllm="num_requests_waiting_by_reason",
)
KV_BLOCKS = gauge(
    "headrace.kv.blocks",
    "{block}",
    "KV blocks by owner: requests, prefix_cache (free, with contents that can be found), empty.",
    (*_WORKER, "owner"),
    vllm="kv_cache_usage_perc",
)
QUERIED_TOKENS = counter(
    "headrace.prefix_cache.queried",
    "{token}",
    "Tokens of the requests that were admitted for the first time.",
    _WORKER,
    vllm="prefix_cache_queries_total",
)
HIT_TOKENS = counter(
    "headrace.prefix_cache.hits",
    "{token}",
    "Tokens of these that were in the prefix cache.",
    _WORKER,
    vllm="prefix_cache_hits_total",
)
PREEMPTIONS = counter(
    "headrace.preemptions",
    "{request}",
    "Running requests that lost their blocks to another request.",
    _WORKER,
    vllm="num_preemptions_total",
)
RECOMPUTED_TOKENS = counter(
    "headrace.recomputed",
    "{token}",
    "Computed tokens that were lost, and are computed again, by cause: preemption, pause (the"
    " client did not read), worker_lost.",
    ("cause",),
)
DRAFT_TOKENS = counter(
    "headrace.drafts.proposed",
    "{token}",
    "Draft tokens that were verified.",
    _WORKER,
    vllm="spec_decode_num_draft_tokens_total",
)
ACCEPTED_DRAFT_TOKENS = counter(
    "headrace.drafts.accepted",
    "{token}",
    "Draft tokens that were right and kept.",
    _WORKER,
    vllm="spec_decode_num_accepted_tokens_total",
)
FINISHED = counter(
    "headrace.scheduler.requests.finished",
    "{request}",
    "Completions that ended in this scheduler, by final status; DEADLINE is a missed deadline.",
    ("status",),
)
TAKEN_UP = counter(
    "headrace.scheduler.requests.taken_up",
    "{request}",
    "Completions that a router submitted under a later epoch, or took over from another router.",
)
RECOVERED = counter(
    "headrace.scheduler.requests.recovered",
    "{request}",
    "Completions that went on, on another worker, after theirs was lost.",
)
STRANDED = gauge(
    "headrace.scheduler.requests.stranded", "{request}", "Completions that no worker has now."
)
WORKERS = gauge("headrace.scheduler.workers", "{worker}", "Workers by state.", ("state",))
LOST_WORKERS = counter(
    "headrace.workers.lost", "{worker}", "How often a worker was lost while in use.", ("worker",)
)

METRICS: tuple[Metric, ...] = (
    *(STEP_DURATION, STEP_GAP, STEP_TOKENS, GENERATED_TOKENS, RUNNING, WAITING, KV_BLOCKS),
    *(QUERIED_TOKENS, HIT_TOKENS, PREEMPTIONS, RECOMPUTED_TOKENS),
    *(DRAFT_TOKENS, ACCEPTED_DRAFT_TOKENS),
    *(FINISHED, TAKEN_UP, RECOVERED, STRANDED, WORKERS, LOST_WORKERS),
    *store_metrics.METRICS,
)

_USES = ("prefill", "decode", "speculative", "idle")


class RequestMeter:
    """Counts what became of requests; owned by the RequestLog."""

    def __init__(self) -> None:
        self.num_finished: Counter[RequestStatus] = Counter()
        self.num_taken_up = 0
        self.num_recovered = 0
        self.num_recomputed_tokens = 0
        self.num_tokens_lost_to_pauses = 0


class WorkerMeter:
    """Counts the steps of one worker, over all its engines. The engine of the moment writes."""

    def __init__(self) -> None:
        self.num_tokens_by_use = dict.fromkeys(_USES, 0)
        self.num_generated_tokens = 0
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.num_draft_tokens = 0
        self.num_accepted_draft_tokens = 0
        self.num_losses = 0
        self.duration = Recorder(STEP_DURATION)
        self.gap = Recorder(STEP_GAP)
        self.facts: StepFacts = NO_FACTS
        self.steps = StepFeed()
        # When the last result came, and whether no plan is in flight since.
        self._last_result_s = 0.0
        self._is_dry = False

    def planned(self, plan: StepPlan) -> None:
        """The core has planned a step, which may be empty."""
        self.facts = plan.facts
        if not plan.is_worth_sending:
            self._is_dry = False  # there is nothing that could run
        if plan.preempted_keys:
            self.num_preemptions += len(plan.preempted_keys)
            self.num_recomputed_tokens += sum(v.num_lost_tokens for v in plan.facts.victims)
        if plan.admissions:
            num_tokens = {row.key: len(row.token_ids) for row in plan.row_requests}
            for admission in plan.admissions:
                if not admission.is_resumed:
                    self.num_queried_tokens += num_tokens.get(admission.key, 0)
                    self.num_hit_tokens += admission.num_cached_tokens

    def sent(
        self,
        plan: StepPlan,
        core: SchedulerCore,
        num_waiting: int,
        request_ids: Sequence[str],
        now_s: float,
    ) -> OpenStep | None:
        """A plan goes to the worker; None: the worker only forgets rows.

        Args:
            plan: what is sent.
            core: what has planned it.
            num_waiting: requests without a row that are not paused.
            request_ids: [max_num_seqs] the request of each row.
            now_s: on the event loop's clock.
        """
        gap_s = 0.0
        if self._is_dry:
            self._is_dry = False
            gap_s = now_s - self._last_result_s
            self.gap.record(gap_s)
        if not plan.num_reqs:
            return None
        # A row that samples advances by one token, its drafts, and the rest of its prefill.
        num_scheduled = plan.num_scheduled_tokens
        num_all, num_drafts = int(num_scheduled.sum()), 0
        own = num_scheduled
        if len(plan.num_draft_tokens):
            num_drafts = int(plan.num_draft_tokens.sum())
            own = num_scheduled - plan.num_draft_tokens
        num_decode = int(np.count_nonzero((own == 1) & ~plan.is_prefill_chunk))
        num_prefill = num_all - num_decode - num_drafts
        num_idle = core.config.max_num_batched_tokens - num_all
        by_use = self.num_tokens_by_use
        by_use["decode"] += num_decode
        by_use["speculative"] += num_drafts
        by_use["prefill"] += num_prefill
        by_use["idle"] += num_idle
        return OpenStep(
            (num_prefill, num_decode, num_drafts, num_idle),
            gap_s,
            core.num_running,
            waiting_by_reason(plan.facts, num_waiting, core.num_paused),
            core.kv_blocks,
            request_ids,
        )

    def got_result(
        self,
        flight: "InFlight",
        came_s: float,
        num_tokens: int,
        drafts: Int32Array,
        now_unix_s: float,
        *,
        is_dry: bool,
    ) -> None:
        """A plan's result, which came at came_s on the event loop's clock, was applied.

        is_dry: no other plan is in flight.
        """
        if flight.step is not None:
            duration_s = came_s - max(flight.sent_s, self._last_result_s)
            self.duration.record(duration_s)
            self.steps.add(flight.step, flight.plan, duration_s, num_tokens, now_unix_s)
        self._last_result_s, self._is_dry = came_s, is_dry
        self.num_generated_tokens += num_tokens
        if len(drafts):
            num_drafts, num_accepted = drafts.sum(axis=0).tolist()
            self.num_draft_tokens += num_drafts
            self.num_accepted_draft_tokens += num_accepted


def read(pool: "Pool", log: "RequestLog", store: StatusStore) -> Iterator[Reading]:
    """Every metric now."""
    workers = [
        ((worker.info.worker_id, worker.info.model), worker.meter, worker.engine)
        for worker in pool.workers
        if worker.info is not None
    ]
    yield _merged(STEP_DURATION, ((key, meter.duration.read()[1]) for key, meter, _ in workers))
    yield _merged(STEP_GAP, ((key, meter.gap.read()[1]) for key, meter, _ in workers))
    yield (
        STEP_TOKENS,
        {(*key, use): meter.num_tokens_by_use[use] for key, meter, _ in workers for use in _USES},
    )
    for metric, name in _COUNTERS:
        yield metric, {key: getattr(meter, name) for key, meter, _ in workers}
    yield from _now(workers)
    yield (
        RECOMPUTED_TOKENS,
        {
            ("preemption",): sum(meter.num_recomputed_tokens for _, meter, _ in workers),
            ("pause",): log.meter.num_tokens_lost_to_pauses,
            ("worker_lost",): log.meter.num_recomputed_tokens,
        },
    )
    ended = [status for status in RequestStatus if status.is_finished]
    yield FINISHED, {(status.name,): log.meter.num_finished[status] for status in ended}
    yield TAKEN_UP, {(): log.meter.num_taken_up}
    yield RECOVERED, {(): log.meter.num_recovered}
    yield STRANDED, {(): pool.num_stranded}
    states = Counter(worker.reported_state for worker in pool.workers)
    yield WORKERS, {(state.value,): states[state] for state in WorkerState}
    yield LOST_WORKERS, {key[:1]: meter.num_losses for key, meter, _ in workers}
    yield from store_metrics.read(store)


_COUNTERS = (
    (GENERATED_TOKENS, "num_generated_tokens"),
    (QUERIED_TOKENS, "num_queried_tokens"),
    (HIT_TOKENS, "num_hit_tokens"),
    (PREEMPTIONS, "num_preemptions"),
    (DRAFT_TOKENS, "num_draft_tokens"),
    (ACCEPTED_DRAFT_TOKENS, "num_accepted_draft_tokens"),
)

_Worker = tuple[Labels, WorkerMeter, "WorkerEngine | None"]


def _merged(metric: Metric, found: Iterable[tuple[Labels, Points]]) -> Reading:
    """Distributions of several workers, each recorded without labels."""
    return metric, {key: points[()] for key, points in found if points}


def _now(workers: Iterable[_Worker]) -> Iterator[Reading]:
    """Requests and blocks of the workers that are here."""
    running: dict[Labels, int] = {}
    waiting: dict[Labels, int] = {}
    blocks: dict[Labels, int] = {}
    for key, meter, engine in workers:
        if engine is None:
            continue
        running[key] = engine.num_running
        counts = waiting_by_reason(meter.facts, engine.num_waiting, engine.num_paused)
        for reason, count in zip(WAIT_REASONS, counts, strict=True):
            waiting[*key, reason.name.lower()] = count
        kv = engine.kv_blocks
        blocks[*key, "requests"] = kv.num_held
        blocks[*key, "prefix_cache"] = kv.num_cached
        blocks[*key, "empty"] = kv.num_empty
    yield RUNNING, running
    yield WAITING, waiting
    yield KV_BLOCKS, blocks
