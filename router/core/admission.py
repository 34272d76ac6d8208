"""Admission: whether a request is taken, decided before anything of the request is queued.

A request needs a permit first, and the rate of its tenant must allow it (see `permits`). Then, in
this order: some ready worker must be able to serve the request (model, length against max_model_len
and KV pool); the deadline must lie ahead and be within reach; and the queue must have room, first
for the tenant, then for all tenants. Admission decides twice: before the prompt is tokenized, with
the least number of tokens that the prompt can have, so that a hopeless request costs nothing; and
again with the real number. Facts about queue and pool are arguments. Refusals are values that say
what to change or when to try again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from headrace.capacity import max_num_tokens

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0


class Reason(Enum):
    """Why a request is refused; the names are the stable reasons that callers see."""

    NO_READY_WORKER = "NO_READY_WORKER"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    MAX_TOKENS_TOO_LARGE = "MAX_TOKENS_TOO_LARGE"
    MIN_TOKENS_TOO_LARGE = "MIN_TOKENS_TOO_LARGE"
    TOO_MANY_COMPLETIONS = "TOO_MANY_COMPLETIONS"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    DEADLINE_OUT_OF_REACH = "DEADLINE_OUT_OF_REACH"
    QUEUE_FULL = "QUEUE_FULL"
    TENANT_QUEUE_FULL = "TENANT_QUEUE_FULL"
    TOO_MANY_LIVE = "TOO_MANY_LIVE"
    TENANT_TOO_MANY_LIVE = "TENANT_TOO_MANY_LIVE"
    TENANT_RATE = "TENANT_RATE"


@dataclass(frozen=True, slots=True)
class Admit:
    """The request is taken; max_tokens as requested, or all that the pool leaves room for."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reject:
    """The request is never queued. retry_after_s is set where a later retry may succeed."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on live requests, waiting completions and their prompt tokens; 0 is no limit.

    Each of a request's n completions counts as a waiting completion.
    """

    max_live_requests: int = 0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TenantLimits(Limits):
    """Limits and rates of one tenant; 0 is no limit. weight is the tenant's fair share."""

    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Completions that wait now, and the tokens of their prompts."""

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The longest request that one ready worker can serve.

    num_tokens: prompt and output tokens at which the scheduler ends any request of the worker.
    """

    max_model_len: int
    num_kv_blocks: int
    block_size: int
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        num_tokens = max_num_tokens(
            max_model_len=self.max_model_len,
            num_kv_blocks=self.num_kv_blocks,
            block_size=self.block_size,
        )
        object.__setattr__(self, "num_tokens", num_tokens)

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the pool holds."""
        return self.num_kv_blocks * self.block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """The properties of a request that admission looks at; deadline is on the clock of `now`.

    is_read: num_prompt_tokens is exact; otherwise the prompt has at least that many tokens.
    """

    num_prompt_tokens: int
    is_read: bool = True
    max_tokens: int | None = None
    min_tokens: int = 0
    num_completions: int = 1
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The state that a request meets: ready workers, waiting requests, speed of the queue.

    predicted_wait_s is for a new request of this tenant. tokens_per_s is the measured rate at
    which prompts leave the queue; None: not known yet.
    """

    capacities: Sequence[Capacity]
    load: QueueLoad
    tenant_load: QueueLoad
    predicted_wait_s: float = 0.0
    tokens_per_s: float | None = None


def decide(
    ask: Ask, situation: Situation, limits: Limits, tenant_limits: TenantLimits, now: float
) -> Admit | Reject:
    """Admits or rejects a request."""
    if not situation.capacities:
        return Reject(
            Reason.NO_READY_WORKER, "no worker is ready for this model yet; try again", 1.0
        )
    fit = fits(ask, situation.capacities)
    if isinstance(fit, Reject):
        return fit
    return (
        _deadline_is_lost(ask, situation, now)
        or _queue_is_full(ask, situation.tenant_load, tenant_limits, situation.tokens_per_s)
        or _queue_is_full(ask, situation.load, limits, situation.tokens_per_s)
        or fit
    )


def fits(ask: Ask, capacities: Sequence[Capacity]) -> Admit | Reject:
    """Whether an empty worker could serve the request; there is at least one capacity."""
    best = max(capacities, key=lambda capacity: capacity.num_tokens)
    room = best.num_tokens - ask.num_prompt_tokens
    if room >= max(1, ask.max_tokens or 0, ask.min_tokens):
        return Admit(room if ask.max_tokens is None else ask.max_tokens)
    prompt = f"{'' if ask.is_read else 'at least '}{ask.num_prompt_tokens} tokens"
    limit = (
        f"max_model_len is {best.max_model_len}"
        if best.max_model_len == best.num_tokens
        else f"the KV pool carries {best.num_tokens}"
    )
    if room < 1:
        return Reject(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {prompt} and {limit}, one output token included; shorten it",
        )
    if ask.max_tokens is not None and ask.max_tokens > room:
        return Reject(
            Reason.MAX_TOKENS_TOO_LARGE,
            f"{ask.max_tokens} and a prompt of {prompt} do not fit: {limit}; at most "
            f"{room} are left for this prompt",
        )
    return Reject(
        Reason.MIN_TOKENS_TOO_LARGE,
        f"{ask.min_tokens} can never come: {limit}, and at most {room} tokens are left for "
        f"this prompt of {prompt}",
    )


def _deadline_is_lost(ask: Ask, situation: Situation, now: float) -> Reject | None:
    if ask.deadline is None:
        return None
    left_s = ask.deadline - now
    if left_s <= 0:
        return Reject(Reason.DEADLINE_PASSED, "had passed before it was queued")
    if situation.predicted_wait_s > left_s:
        return Reject(
            Reason.DEADLINE_OUT_OF_REACH,
            f"is {left_s:.1f} s away and the wait alone takes about "
            f"{situation.predicted_wait_s:.1f} s now",
        )
    return None


def _queue_is_full(
    ask: Ask, load: QueueLoad, limits: Limits, tokens_per_s: float | None
) -> Reject | None:
    """Refuse a request with which the load would exceed the limits, of a tenant or of all."""
    whose, reason = "", Reason.QUEUE_FULL
    if isinstance(limits, TenantLimits):
        whose, reason = "of this tenant ", Reason.TENANT_QUEUE_FULL
    max_requests, max_tokens = limits.max_queued_requests, limits.max_queued_tokens
    if max_requests and ask.num_completions > max_requests:
        # Even an empty queue cannot take the request, so a retry would never succeed.
        return Reject(
            Reason.TOO_MANY_COMPLETIONS,
            f"{ask.num_completions} completions never fit, {max_requests} {whose}may wait here; "
            "ask for fewer",
        )
    num_tokens = load.num_tokens + ask.num_prompt_tokens * ask.num_completions
    if max_requests and load.num_requests + ask.num_completions > max_requests:
        message = f"{load.num_requests} requests {whose}wait here and {max_requests} may"
    elif max_tokens and num_tokens > max_tokens:
        message = f"prompts of {load.num_tokens} tokens {whose}wait here and {max_tokens} may"
    else:
        return None
    return Reject(reason, f"{message}; try again later", retry_after_s(load, tokens_per_s))


def retry_after_s(load: QueueLoad, tokens_per_s: float | None) -> float:
    """When about half of the load will be served; 1 s while the rate is not known."""
    if not tokens_per_s:
        return 1.0
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, load.num_tokens / 2 / tokens_per_s))
