"""The schema of a trace's records: types and bounds, checked when a file is read.

Recordings are untrusted, and a core allocates its tables in the sizes they state, so every size
is bounded here. Fields that no code reads are not declared, and are dropped on reading.
"""

from typing import Annotated, Literal, NotRequired, TypedDict

import msgspec
from msgspec import Meta

from scheduler.core.policy import PolicySetting

_MAX_INT32 = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=_MAX_INT32)]
# -1 is a draft whose token is not known yet.
Token = Annotated[int, Meta(ge=-1, le=_MAX_INT32)]
TokenIds = list[Token]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Length = Annotated[int, Meta(ge=1, le=1 << 24)]
Names = list[str]


class ConfigRecord(TypedDict):
    """Settings of a core."""

    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    num_gpu_blocks: Annotated[int, Meta(ge=2, le=1 << 22)]
    max_model_len: Length
    max_num_batched_tokens: Length
    max_num_scheduled_tokens: NotRequired[Length | None]
    max_num_seqs: Annotated[int, Meta(ge=1, le=1 << 14)]
    long_prefill_token_threshold: Count
    long_prefill_share: NotRequired[Annotated[float, Meta(ge=0, le=1)]]
    enable_chunked_prefill: bool
    policy: PolicySetting
    priority_preemption: NotRequired[bool]
    enable_prefix_caching: bool
    watermark: Annotated[float, Meta(ge=0, lt=1)]
    scheduler_reserve_full_isl: bool
    num_spec_tokens: Annotated[int, Meta(ge=0, le=64)]
    spec_kind: Literal["ngram", "draft", "eagle"] | None


class OracleRecord(TypedDict):
    """The program that made the trace."""

    pipeline_depth: Annotated[int, Meta(ge=1, le=8)]


class RepetitionRecord(TypedDict):
    """The limits at which repeated tokens end a request."""

    max_pattern_size: Count
    min_pattern_size: Count
    min_count: Count


class RemotePrefixRecord(TypedDict):
    """The KV of a request that another worker has."""

    source: str
    num_blocks: Count
    expires_at: float


class TracedRequest(TypedDict):
    """A request."""

    arrival_time: float
    prompt: Annotated[TokenIds, Meta(min_length=1)]
    max_tokens: Count
    priority: NotRequired[Int64]
    min_tokens: NotRequired[Count]
    stop_token_ids: NotRequired[TokenIds]
    cache_salt: NotRequired[str | None]
    skip_reading_prefix_cache: NotRequired[bool]
    use_eos: NotRequired[bool]
    eos_token_ids: NotRequired[TokenIds | None]
    output: NotRequired[TokenIds]
    deadline: NotRequired[float | None]
    blocked_until: NotRequired[int]
    repetition: NotRequired[RepetitionRecord | None]
    remote_prefix: NotRequired[RemotePrefixRecord]
    export_s: NotRequired[float]


class PlanRecord(TypedDict):
    """A step's decisions; only compared."""

    tokens: dict[str, Count]
    computed: dict[str, Count]
    new: Names
    resumed: Names
    hit: NotRequired[dict[str, Count]]
    preempted: NotRequired[Names]
    preempt_info: NotRequired[list[list[str | int]]]
    spec: NotRequired[dict[str, TokenIds]]
    blocks: NotRequired[dict[str, list[Count]]]
    begun_leases: NotRequired[list[list[Count]]]
    ended_leases: NotRequired[list[Count]]
    finished_ids: NotRequired[Names]
    common_prefix: NotRequired[Count]
    free: Count


class OutputRecord(TypedDict):
    """A step's output for one request."""

    id: str
    tokens: TokenIds
    finish: NotRequired[str]
    stop_reason: NotRequired[str | int]
    cached: NotRequired[Count]


class UpdateRecord(TypedDict):
    """A step's result, and the core's output for the result."""

    of: Count
    sampled: dict[str, TokenIds]
    out: list[OutputRecord]
    pc: NotRequired[list[Count]]
    now: NotRequired[float]
    failed: NotRequired[Names]


class StateRecord(TypedDict):
    """The state after a step; only compared."""

    free: NotRequired[Count]
    free_crc: NotRequired[int]
    free_head: NotRequired[list[Count]]
    running: NotRequired[Names]
    waiting: NotRequired[Names]
    skipped: NotRequired[Names]
    held: NotRequired[Names]
    paused: NotRequired[Names]
    reqs: dict[str, list[str | int]]


class StepRecord(TypedDict):
    """A step: its inputs, its plan, a result, the state after it."""

    i: Count
    now: NotRequired[float]
    throttle: NotRequired[bool]
    ctl: NotRequired[list[list[str | bool | Names]]]
    add: NotRequired[Names]
    ready: NotRequired[Names]
    leases: NotRequired[list[tuple[Literal["commit", "end"], Count]]]
    client: NotRequired[list[list[str]]]
    abort: NotRequired[Names]
    sched: NotRequired[PlanRecord]
    abort_mid: NotRequired[Names]
    update: NotRequired[UpdateRecord]
    drafts: NotRequired[dict[str, TokenIds]]
    state: StateRecord
    # Only in recordings: the requests named in `add`.
    requests: NotRequired[dict[str, TracedRequest]]


class LiveRecord(TypedDict):
    """A live request of a snapshot; the optional fields are set for a running request."""

    status: str
    output: TokenIds
    is_ready: bool
    num_preemptions: Count
    num_cached_tokens: Int64
    num_stale_tokens: Count
    drop_stale: bool
    status_after_pause: NotRequired[str]
    num_computed: NotRequired[Count]
    drafts: NotRequired[TokenIds]
    num_placeholders: NotRequired[Count]
    blocks: NotRequired[list[Count]]
    num_registered: NotRequired[Count]
    is_prefill_chunk: NotRequired[bool]
    is_long: NotRequired[bool]


class FlightRecord(TypedDict):
    """A step without a result."""

    step_id: Count
    names: list[str | None]
    is_stale: list[bool]
    num_scheduled: list[Count]
    is_prefill_chunk: list[bool]
    num_drafts: list[Count] | None


class LeaseRecord(TypedDict):
    """Blocks in transfer; request is None for the export of a request that has ended."""

    id: Count
    request: str | None
    source: str
    blocks: list[Count]
    num_present: Count
    expires_at: float
    is_committed: bool


class LeasesRecord(TypedDict):
    """All leases, how many there have been, and whose beginning or end no plan has named yet."""

    num_begun: Count
    begun: list[Count]
    ended: list[Count]
    live: list[LeaseRecord]


class SnapshotRecord(TypedDict):
    """A core's whole state."""

    step_id: Count
    now: float
    pause: str
    is_saturated: bool
    stats: list[Count]
    running: Names
    waiting: Names
    skipped: Names
    held: NotRequired[Names]
    paused: NotRequired[Names]
    requests: dict[str, LiveRecord]
    free_blocks: list[Count]
    cached: list[tuple[str, list[Count]]]
    flights: list[FlightRecord]
    leases: NotRequired[LeasesRecord]


class StartRecord(TypedDict):
    """The initial state of a recording that begins in the middle of a run."""

    step: Count
    state: SnapshotRecord
    finished_ids: Names
    first_cached: dict[str, Int64]
    flights: list[tuple[Count, Names]]


class HeadRecord(TypedDict):
    """A trace without its steps; with `steps`, the whole trace."""

    config: ConfigRecord
    oracle: OracleRecord
    name: NotRequired[str]
    eos_token_id: NotRequired[Token | None]
    requests: NotRequired[dict[str, TracedRequest]]
    start: NotRequired[StartRecord]
    steps: NotRequired[list[msgspec.Raw]]


decode_head = msgspec.json.Decoder(HeadRecord).decode
decode_step = msgspec.json.Decoder(StepRecord).decode
