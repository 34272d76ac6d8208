"""Steps of workers and waiting requests, as users of Headrace get them; see `headrace.types`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStep:
    """One step of a worker, once its result came; counts of requests and blocks are the plan's.

    position grows from step to step of a worker. start_time_unix_s is when the worker could begin,
    and gap_s for how long before that it had no plan although requests could run. The four kinds of
    tokens add up to the step's token budget.
    """

    position: int
    step_id: int
    start_time_unix_s: float
    duration_s: float
    gap_s: float
    prefill_tokens: int
    decode_tokens: int
    speculative_tokens: int
    idle_tokens: int
    generated_tokens: int
    num_requests: int
    num_running: int
    num_waiting_by_reason: Mapping[str, int]
    num_preemptions: int
    kv_blocks_held: int
    kv_blocks_cached: int
    kv_blocks_empty: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSteps:
    """Steps of one worker, oldest first; has_gap: steps before these are no longer kept."""

    worker_id: str
    scheduler_id: str
    model: str
    steps: tuple[WorkerStep, ...]
    has_gap: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One request in a step; num_tokens include num_drafts.

    kind is "prefill_chunk" (more of the prefill follows), "prefill", "decode" or "speculative".
    """

    request_id: str
    num_tokens: int
    num_drafts: int
    num_computed_tokens: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """A step and the requests in it, in the plan's order."""

    worker_id: str
    step: WorkerStep
    rows: tuple[StepRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRequest:
    """A request that waits; worker_id "" is in the router.

    The numbers of blocks are 0 unless the reason is about blocks.
    """

    request_id: str
    tenant: str
    model: str
    num_tokens: int
    priority: int
    arrival_time_unix_s: float
    worker_id: str
    reason: str
    num_needed_blocks: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePage:
    """Some of the requests that wait, in order, and how many wait in all."""

    requests: tuple[WaitingRequest, ...]
    num_waiting: int
