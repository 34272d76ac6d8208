"""What `headrace top` shows, as rows of text: the last minute of the pool. Draws nothing."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headrace.durations import RecentDurations

if TYPE_CHECKING:
    from headrace.steps import WaitingRequest, WorkerStep, WorkerSteps
    from headrace.types import PoolInfo, WorkerStatus

WINDOW_S = 60.0
# A worker whose last step is older does nothing now.
_RECENT_S = 2.0
_MAX_STEPS = 4096

_QUANTILES = (50, 90, 99)

TTFT = "gen_ai.server.time_to_first_token"
TPOT = "gen_ai.server.time_per_output_token"
# One letter each: without colour a bar must tell them apart.
USES = (("P", "prefill"), ("D", "decode"), ("S", "speculative"), (".", "idle"))
SORTS = ("worker", "running", "waiting", "kv used", "step time")


# A table has a blank on each side of a cell.
_PADDING = 2
_SCROLLBAR = 2
_LEAST_BAR = 8
COLUMNS = ("WORKER", "STATE", "RUN", "WAIT", "KV", "STEP ms", "/s", "BUDGET")


class View:
    """The pool over the last minute; `now` is the caller's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.pool: PoolInfo | None = None
        self.queue: Sequence[WaitingRequest] = ()
        self.num_waiting = 0
        self._now = 0.0
        self._steps_by_worker: dict[str, deque[WorkerStep]] = {}
        self._seen_by_worker: dict[str, float] = {}
        self._recent_durations = RecentDurations(WINDOW_S)

    def take_pool(self, pool: "PoolInfo", now: float) -> None:
        """An answer of the router."""
        self.pool, self._now = pool, now
        self._recent_durations.add("", pool.durations, now)
        known = {worker.worker_id for worker in pool.workers}
        for gone in self._steps_by_worker.keys() - known:
            del self._steps_by_worker[gone]

    def take_steps(self, workers: "Iterable[WorkerSteps]", now: float) -> None:
        """New steps."""
        self._now = now
        for worker in workers:
            self._seen_by_worker[worker.worker_id] = now
            kept = self._steps_by_worker.setdefault(worker.worker_id, deque(maxlen=_MAX_STEPS))
            kept.extend(worker.steps)

    def last_position(self) -> dict[str, int]:
        """Where to go on, by worker."""
        return {name: steps[-1].position for name, steps in self._steps_by_worker.items() if steps}

    def steps_of(self, worker_id: str) -> "Sequence[WorkerStep]":
        """The steps of a worker, oldest first."""
        return self._steps_by_worker.get(worker_id, ())

    def percentiles(self, metric: str) -> str:
        """The median, the 90th and the 99th percentile of a duration over the last minute."""
        found = [(q, self._recent_durations.percentile_s(metric, q / 100)) for q in _QUANTILES]
        return "  ".join(f"p{q} {'-' if value is None else _short(value)}" for q, value in found)

    def summary(self) -> str:
        """Three lines on the whole pool."""
        pool = self.pool
        if pool is None:
            return "waiting for the router\n\n"
        num_running = sum(worker.num_running for worker in pool.workers)
        num_at_workers = sum(worker.num_waiting for worker in pool.workers)
        return (
            f"{pool.num_queued} wait in the router, {num_at_workers} at workers, "
            f"{num_running} run, {pool.num_paused} paused\n"
            f"TTFT {self.percentiles(TTFT)}\n"
            f"TPOT {self.percentiles(TPOT)}"
        )

    def workers(self, sort: str, *, is_reversed: bool, width: int) -> list[tuple[str, ...]]:
        """The rows of COLUMNS; numbers begin with the largest. Bars take what a line has left."""
        pool = self.pool
        if pool is None:
            return []

        def rank(worker: "WorkerStatus") -> tuple[float, str]:
            value = {
                "running": worker.num_running,
                "waiting": worker.num_waiting,
                "kv used": kv_used(worker),
                "step time": _mean_duration_s(self._recent(worker.worker_id)),
            }.get(sort, 0.0)
            return (-value, worker.worker_id)

        in_order = sorted(pool.workers, key=rank, reverse=is_reversed)
        rows = [self._cells(worker) for worker in in_order]
        widths = [max(map(len, column)) + _PADDING for column in zip(COLUMNS, *rows, strict=False)]
        used = sum(widths[: len(COLUMNS) - 1]) + _PADDING + _SCROLLBAR
        bar_width = max(_LEAST_BAR, width - used)
        bars = [bar(self._recent(worker.worker_id), bar_width) for worker in in_order]
        return [(*cells, drawn) for cells, drawn in zip(rows, bars, strict=True)]

    def _cells(self, worker: "WorkerStatus") -> tuple[str, ...]:
        """A worker's cells before the bar; what a worker without recent steps lacks is empty."""
        steps = self._recent(worker.worker_id)
        span_s = max(1e-9, steps[-1].position - steps[0].position) / 1e6 if steps else 1.0
        return (
            worker.worker_id,
            worker.state,
            f"{worker.num_running}/{worker.max_num_seqs}",
            str(worker.num_waiting),
            f"{kv_used(worker):.0%}",
            f"{_mean_duration_s(steps) * 1000:.1f}" if steps else "",
            f"{(len(steps) - 1) / span_s:.0f}" if len(steps) > 1 else "",
        )

    def _recent(self, worker_id: str) -> "list[WorkerStep]":
        """The last steps of a worker that made a step just now."""
        steps = self._steps_by_worker.get(worker_id)
        if not steps or self._now - self._seen_by_worker[worker_id] > _RECENT_S:
            return []
        since = steps[-1].position - _RECENT_S * 1e6
        found = []
        for step in reversed(steps):
            if step.position < since:
                break
            found.append(step)
        return found[::-1]

    def tenants(self) -> list[tuple[str, str, str]]:
        """The router's queue by tenant: requests, tokens."""
        loads = self.pool.queued_by_tenant if self.pool is not None else ()
        names = {"": "(default)", "*": "(others)"}
        return [
            (names.get(load.tenant, load.tenant), str(load.num_requests), str(load.num_tokens))
            for load in loads
        ]

    def requests(self) -> list[tuple[str, ...]]:
        """The requests that wait: id, tenant, tokens, seconds, where, why."""
        now = self.pool.time_unix_s if self.pool is not None else 0.0
        return [
            (
                request.request_id,
                request.tenant or "(default)",
                str(request.num_tokens),
                f"{max(0.0, now - request.arrival_time_unix_s):.1f}",
                request.worker_id or "router",
                _reason(request),
            )
            for request in self.queue
        ]


def kv_used(worker: "WorkerStatus") -> float:
    """The share of a worker's KV blocks that requests hold."""
    if not worker.num_kv_blocks:
        return 0.0
    return 1 - worker.num_free_kv_blocks / worker.num_kv_blocks


def bar(steps: "Sequence[WorkerStep]", width: int) -> str:
    """The token budget of steps by use, as letters; what was used at all has a letter at least."""
    sums = [sum(getattr(step, f"{use}_tokens") for step in steps) for _, use in USES]
    total = sum(sums)
    if not total or width < len(USES):
        return ""
    lengths = [max(1, value * width // total) if value else 0 for value in sums]
    # Idle is what is left; where nothing is idle, the largest part takes the rest.
    rest = 3 if sums[3] else lengths.index(max(lengths[:3]))
    lengths[rest] = max(1, lengths[rest] + width - sum(lengths))
    return "".join(letter * n for (letter, _), n in zip(USES, lengths, strict=True))[:width]


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _mean_duration_s(steps: "Sequence[WorkerStep]") -> float:
    return sum(step.duration_s for step in steps) / len(steps) if steps else 0.0


def _reason(request: "WaitingRequest") -> str:
    blocks = ""
    if request.num_needed_blocks:
        blocks = f" ({request.num_needed_blocks}, {request.num_free_blocks} free)"
    return request.reason.replace("_", " ") + blocks
