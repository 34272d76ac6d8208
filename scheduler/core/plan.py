"""The scheduling core's interface: settings, requests, plans, results and outputs.

Arrays are columns over the requests of a step, in the plan's order: running requests first, then
admissions. The core knows no clock, no wire format and no tensor.

"Quirk of vLLM 0.27.1" marks behaviour that the core keeps because recordings of that version must
replay. No service sets these features today; recordings of vLLM reach all but the leases:

* spec_kind "draft" and "eagle" (lookahead slots), drafts in a pipeline, `update_drafts`;
* enable_chunked_prefill and reserve_full_sequence set to False, pipeline_depth above 2;
* `needs_grammar` with `mark_ready`, repetition limits;
* leases (`remote_prefix`, `export_s`), which only tests reach so far;
* throttle_prefills, `set_pause`, `reset_prefix_cache`, `num_common_prefix_blocks`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.capacity import max_num_tokens
from scheduler.core.block_hash import BlockHashes
from scheduler.core.policy import PolicyName

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

EMPTY_INT32: Int32Array = np.empty(0, dtype=np.int32)


class RequestStatus(IntEnum):
    """State of a request; every value above PREEMPTED is final."""

    WAITING = 1
    WAITING_FOR_GRAMMAR = 2
    WAITING_FOR_REMOTE_KV = 3
    WAITING_FOR_CLIENT = 4
    RUNNING = 5
    PREEMPTED = 6
    STOPPED = 7
    LENGTH_CAPPED = 8
    REPETITION = 9
    ABORTED = 10
    ERROR = 11
    DEADLINE = 12

    @property
    def is_finished(self) -> bool:
        return self > RequestStatus.PREEMPTED


class Pause(Enum):
    """How much of scheduling is paused."""

    UNPAUSED = "UNPAUSED"
    PAUSED_NEW = "PAUSED_NEW"
    PAUSED_ALL = "PAUSED_ALL"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of one worker's scheduling.

    num_gpu_blocks includes the reserved null block 0. watermark is the fraction of num_gpu_blocks
    kept free at admission. spec_kind "ngram" needs no lookahead slots, "draft" and "eagle" need
    num_spec_tokens of them. pipeline_depth is the number of plans that may be without a result;
    above 1 a step is planned before the tokens of the previous step are known. long_prefill_share
    is explained in `long_prefills`.
    """

    block_size: int
    num_gpu_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    long_prefill_token_threshold: int = 0
    long_prefill_share: float = 1.0
    enable_chunked_prefill: bool = True
    policy: PolicyName = "fcfs"
    enable_prefix_caching: bool = True
    watermark: float = 0.0
    reserve_full_sequence: bool = True
    num_spec_tokens: int = 0
    spec_kind: Literal["ngram", "draft", "eagle"] | None = None
    pipeline_depth: int = 1

    @property
    def num_lookahead_tokens(self) -> int:
        """KV slots that a draft model writes beyond a request's scheduled tokens."""
        return self.num_spec_tokens if self.spec_kind in {"draft", "eagle"} else 0

    @property
    def max_num_tokens(self) -> int:
        """Tokens at which any request ends.

        Without this limit a request that outgrows the whole pool would wait at the head of the
        queue for ever.
        """
        return max_num_tokens(
            max_model_len=self.max_model_len,
            num_kv_blocks=self.num_gpu_blocks - 1,
            block_size=self.block_size,
            num_lookahead_tokens=self.num_lookahead_tokens,
        )


@dataclass(frozen=True, slots=True)
class RepetitionLimit:
    """Ends a request whose output ends in a pattern of such a size, min_count times in a row."""

    max_pattern_size: int
    min_pattern_size: int
    min_count: int


@dataclass(frozen=True, slots=True)
class RemotePrefix:
    """The first num_blocks full blocks of a request's tokens, whose KV another worker has.

    source names the worker and its lease, for this worker. expires_at is the end of that lease, on
    the clock of `now`.
    """

    source: str
    num_blocks: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """A request as the caller adds it.

    key is the caller's number of the request, unique among live requests; outputs name it.
    prompt_token_ids and output_token_ids (generated under an earlier epoch) are [num_tokens]; the
    core owns them from then on. deadline is on the clock of `now`. export_s: for so long after
    max_tokens its full blocks are kept for another worker; needs the prefix cache. is_recovering:
    the request had begun on a worker that was lost; only its history tells.
    """

    key: int
    request_id: str
    prompt_token_ids: Int32Array
    max_tokens: int
    output_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    arrival_time: float = 0.0
    priority: int = 0
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False
    deadline: float | None = None
    needs_grammar: bool = False
    remote_prefix: RemotePrefix | None = None
    export_s: float = 0.0
    repetition: RepetitionLimit | None = None
    block_hashes: BlockHashes | None = None  # hashed ahead by the caller, wholly or in part
    is_recovering: bool = False


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request that a plan assigns to a row; token_ids is [num_tokens], prompt first."""

    row: int
    key: int
    request_id: str
    token_ids: Int32Array
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Admission:
    """A request admitted in this step; num_cached_tokens were in the prefix cache."""

    key: int
    request_id: str
    num_cached_tokens: int
    is_resumed: bool


class WaitReason(Enum):
    """Why a waiting request was not admitted in a step."""

    BUDGET = "token budget used up"
    SEQUENCE_SLOTS = "max_num_seqs are running"
    BLOCKS = "not enough free blocks"
    WATERMARK = "free blocks are held back by the watermark"
    PREEMPTION = "a running request was preempted in this step"
    GRAMMAR = "grammar not compiled yet"
    REMOTE_KV = "KV from another worker not here yet"
    CLIENT = "its client does not read"
    OUTPUT_IN_FLIGHT = "its output from before the preemption is still in flight"
    PAUSED = "scheduling is paused"
    THROTTLED = "prefills are throttled"
    LONG_PREFILLS = "other long prefills have their share of the step"
    BEHIND_HEAD = "behind the head of the queue"


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A waiting request that was considered and not admitted.

    The block counts are 0 unless the reason is BLOCKS or WATERMARK.
    """

    key: int
    request_id: str
    reason: WaitReason
    num_needed_blocks: int = 0
    num_free_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Victim:
    """A running request that lost its blocks to another request, the trigger.

    was_scheduled: the victim had tokens in this step; they were returned to the budget. The trigger
    has a key beside its id because an id may be used again and a key is not.
    """

    key: int
    request_id: str
    trigger_key: int
    trigger_id: str
    num_needed_blocks: int
    num_lost_tokens: int
    was_scheduled: bool


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Why a step looks as it does.

    passed_over are the waiting requests that were considered; num_behind_head more wait.
    """

    passed_over: tuple[PassedOver, ...] = ()
    victims: tuple[Victim, ...] = ()
    num_behind_head: int = 0


NO_FACTS = StepFacts()


class KvBlocks(NamedTuple):
    """Blocks that requests hold, free blocks with cached contents, and other free blocks."""

    num_held: int
    num_cached: int
    num_empty: int


@dataclass(slots=True)
class PrefixCacheStats:
    """Prefix cache use of admissions since the last call; resumed ones are counted apart."""

    num_requests: int = 0
    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_resumed_requests: int = 0
    num_resumed_queried_tokens: int = 0
    num_resumed_hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """Whether the prefix cache was cleared, and the requests preempted for it, in order."""

    is_reset: bool
    preempted_keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that reached a final status; its blocks are already free, or exported.

    export_lease_id is the lease that keeps its blocks for another worker. output_token_ids is
    [num_tokens], all that the request generated.
    """

    key: int
    request_id: str
    status: RequestStatus
    stop_token_id: int | None
    num_preemptions: int
    output_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32, compare=False)
    export_lease_id: int | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """KV blocks in transfer, in the order of the prompt, and the digests of their contents.

    source is where the contents come from; "" for an export. The contents of the first num_present
    blocks are here already. key is the request's.
    """

    lease_id: int
    key: int
    source: str
    block_ids: Sequence[int]
    digests: Sequence[bytes]
    num_present: int
    expires_at: float

    @property
    def is_import(self) -> bool:
        return bool(self.source)

    @property
    def missing_block_ids(self) -> Sequence[int]:
        """The blocks that an import's transfer writes."""
        return self.block_ids[self.num_present :]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. The worker applies freed_rows, then row_requests, then the appended blocks.

    Before all of these the worker stops the transfers of ended_leases, and before the step runs it
    begins those of begun_leases.

    expired are the requests that this schedule ended because their deadline had passed.
    """

    step_id: int
    freed_rows: Int32Array  # [num_freed]
    row_requests: tuple[RowRequest, ...]
    appended_block_rows: Int32Array  # [num_appended]
    appended_block_ids: Int32Array  # [num_appended]
    rows: Int32Array  # [num_reqs]
    num_computed_tokens: Int32Array  # [num_reqs] before this step
    num_scheduled_tokens: Int32Array  # [num_reqs] drafts included
    num_draft_tokens: Int32Array  # [num_reqs], or [0] when no row has drafts
    draft_token_ids: Int32Array  # [sum(num_draft_tokens)]
    is_prefill_chunk: BoolArray  # [num_reqs] the prefill goes on after this step; no token yet
    admissions: tuple[Admission, ...]
    preempted_keys: tuple[int, ...]
    expired: tuple[FinishedRequest, ...]
    facts: StepFacts = NO_FACTS
    begun_leases: tuple[Lease, ...] = ()
    ended_leases: tuple[int, ...] = ()

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def is_worth_sending(self) -> bool:
        """Whether the worker has anything to do or to forget."""
        has_leases = bool(self.begun_leases or self.ended_leases)
        return bool(len(self.rows) or len(self.freed_rows)) or has_leases


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Tokens that the worker sampled, in the plan's order; 0 for an unfinished prefill."""

    step_id: int
    num_sampled_tokens: Int32Array  # [num_reqs]
    token_ids: Int32Array  # [sum(num_sampled_tokens)]
    num_draft_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_reqs] or [0]
    draft_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    failed_rows: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The tokens that requests keep, and the requests that ended."""

    step_id: int
    keys: Int64Array  # [num_outputs]
    num_new_tokens: Int32Array  # [num_outputs]
    token_ids: Int32Array  # [sum(num_new_tokens)]
    finished: tuple[FinishedRequest, ...]
