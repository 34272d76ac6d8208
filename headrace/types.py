"""What users of Headrace hand in and get back, as plain typed values.

The meaning and default of each field is that of protos/headrace/v1; None means unset.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.parameters import Numbers
from headrace.vocabulary import FinishReason


class AbortResult(StrEnum):
    """What `abort` found."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already finished"
    NOT_FOUND = "not found"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation; role as the model's template allows, e.g. "user"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(Numbers):
    """How tokens are chosen and when to stop. None is the model's default; every other means "off".

    The numbers of `headrace.parameters` are fields, too. One string for `stop` or `bad_words`
    stands for a sequence of one.
    """

    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str] | str = ()
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # A string is a sequence of its letters, which is never meant.
        for name in ("stop", "bad_words"):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's log probability, its rank from 1, and the likeliest tokens there, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt, generated over all n, and of the prompt from the prefix cache.

    draft_tokens were proposed and verified, over all n. accepted_draft_tokens of them were
    delivered: output tokens without a step of their own.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """News of one completion.

    index says which of the n completions. text is whole characters and may lag behind token_ids;
    first_token_position is where token_ids[0] stands among the generated ones. finish_reason is
    set in a completion's last delta, usage in the last delta of all, prompt_logprobs (one per
    prompt token but the first) in the first. num_resumes is how often the stream was resumed by
    then.
    """

    request_id: str
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    first_token_position: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    text_offsets: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_resumes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One whole completion."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    matched_stop: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A whole answer: one output for each of the n completions.

    num_resumes is how often the connection was lost and the stream resumed.
    """

    request_id: str
    outputs: tuple[Output, ...]
    usage: Usage | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_resumes: int = 0

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text


@dataclass(frozen=True, slots=True)
class AbortOutcome:
    """One request that was to be aborted."""

    request_id: str
    result: AbortResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRecord:
    """Where a request stands. Times are seconds since the epoch of Unix.

    router_id, scheduler_id and worker_id last had the request; "" where none has had it.
    """

    request_id: str
    state: str
    epoch: int
    tenant: str
    model: str
    create_time_unix_s: float
    update_time_unix_s: float
    prompt_tokens: int
    completion_tokens: int
    detail: str
    router_id: str = ""
    scheduler_id: str = ""
    worker_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainEvent:
    """One entry of a request's scheduling history, over steps first_step to last_step."""

    first_step: int
    last_step: int
    kind: str
    detail: str
    num_tokens: int
    queue_position: int | None
    time_unix_s: float
    duration_s: float = 0.0
    num_needed_blocks: int = 0
    num_free_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTime:
    """A part of a request's time; cause is that of a WAIT, else empty."""

    stage: str
    cause: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLoad:
    """What waits in a queue for a tenant; "*" stands for all tenants that have no entry."""

    tenant: str
    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHistory:
    """The scheduling history of a request.

    The seconds of breakdown add up to total_s. queued_with is what waited in the router's queue for
    the model as the request was queued. begin_time_unix_s: when its scheduler got it; 0: none has.
    """

    request_id: str
    events: tuple[ExplainEvent, ...]
    steps_waited_by_cause: Mapping[str, int]
    recomputed_tokens: int
    cached_tokens: int
    num_preemptions: int
    breakdown: tuple[StageTime, ...] = ()
    total_s: float = 0.0
    queued_with: tuple[TenantLoad, ...] = ()
    begin_time_unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model that is served; without a chat template it takes no messages.

    default_sampling has what a request gets where it leaves that field of `Sampling` unset; a chat
    request gets default_chat_max_tokens.
    """

    name: str
    max_model_len: int
    vocab_size: int
    num_ready_workers: int
    has_chat_template: bool
    default_sampling: Mapping[str, float] = field(default_factory=dict)
    default_chat_max_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """A gpuworker and its load."""

    worker_id: str
    model: str
    role: str
    state: str
    device: str
    dtype: str
    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_free_kv_blocks: int
    num_kv_blocks: int
    block_size: int
    max_model_len: int
    max_num_batched_tokens: int
    version: str = ""
    driver: str = ""
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLink:
    """A scheduler as the router sees it; error says why the router is not connected.

    clock_offset_s is the scheduler's clock minus the router's, less by the time of a report.
    """

    address: str
    scheduler_id: str
    connected: bool
    version: str
    clock_offset_s: float
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationCounts:
    """Durations of a model's requests since a router started, counted by bucket.

    metric is an OpenTelemetry name, e.g. "gen_ai.server.time_to_first_token". bounds_s are the
    upper bounds of the buckets, in seconds; counts has one more, of what is longer.
    """

    metric: str
    model: str
    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """The workers and schedulers, and what waits in and is out from the router that was asked.

    version and time_unix_s (seconds since the epoch) are the router's. is_store_up: the status
    store answers.
    """

    workers: tuple[WorkerStatus, ...]
    num_queued: int
    num_in_flight: int
    num_paused: int
    version: str = ""
    time_unix_s: float = 0.0
    schedulers: tuple[SchedulerLink, ...] = ()
    has_store: bool = False
    is_store_up: bool = False
    durations: tuple[DurationCounts, ...] = ()
    queued_by_tenant: tuple[TenantLoad, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAudit:
    """Who owns the KV blocks of a worker, and what is wrong with that.

    num_compared_rows is None where the worker gave no account of its own rows. Without faults the
    ledger is sound.
    """

    worker_id: str
    scheduler_id: str
    num_kv_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_owned_blocks: int
    num_requests: int
    num_compared_rows: int | None
    faults: tuple[str, ...]
