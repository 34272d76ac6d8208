"""Whether a request is let in, decided before anything of it is queued.

The rule, in this order: it must be servable by some ready worker (its model, its length against
max_model_len and the KV pool), its deadline must lie ahead, and there must be room in the queue.
Facts about queue and pool come in as arguments; refusals are values, and say what to change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Why a request is refused; the names are the stable reasons that callers see."""

    NO_READY_WORKER = "NO_READY_WORKER"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    MAX_TOKENS_TOO_LARGE = "MAX_TOKENS_TOO_LARGE"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    QUEUE_FULL = "QUEUE_FULL"


@dataclass(frozen=True, slots=True)
class Admit:
    """Let in; max_tokens is what was asked for, or all that the pool leaves room for."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reject:
    """Never queued. retry_after_s is set where trying again later helps."""

    reason: Reason
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What may wait in this router: requests (each of n completions counts) and their prompts."""

    max_queued_requests: int
    max_queued_tokens: int


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """What waits now."""

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """The longest request that one ready worker can serve."""

    max_model_len: int
    num_kv_tokens: int

    @property
    def num_tokens(self) -> int:
        return min(self.max_model_len, self.num_kv_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What of a request decides its admission; deadline is on the clock of `now`."""

    num_prompt_tokens: int
    max_tokens: int | None = None
    num_completions: int = 1
    deadline: float | None = None


def decide(
    ask: Ask, capacities: Sequence[Capacity], load: QueueLoad, limits: Limits, now: float
) -> Admit | Reject:
    """Admit or Reject; capacities are those of the ready workers of the request's model."""
    if not capacities:
        return Reject(
            Reason.NO_READY_WORKER, "no worker is ready for this model yet; try again", 1.0
        )
    fit = fits(ask, capacities)
    if isinstance(fit, Reject):
        return fit
    if ask.deadline is not None and ask.deadline <= now:
        return Reject(Reason.DEADLINE_PASSED, "the deadline had passed before it was queued")
    full = _queue_has_room(ask, load, limits)
    return full or fit


def fits(ask: Ask, capacities: Sequence[Capacity]) -> Admit | Reject:
    """Whether some worker could serve it when empty; capacities has at least one."""
    best = max(capacities, key=lambda capacity: capacity.num_tokens)
    room = best.num_tokens - ask.num_prompt_tokens
    limit = (
        f"max_model_len is {best.max_model_len}"
        if best.max_model_len <= best.num_kv_tokens
        else f"the KV pool holds {best.num_kv_tokens}"
    )
    if room < 1:
        return Reject(
            Reason.PROMPT_TOO_LONG,
            f"the prompt has {ask.num_prompt_tokens} tokens and {limit}, one output token "
            "included; shorten it",
        )
    if ask.max_tokens is not None and ask.max_tokens > room:
        return Reject(
            Reason.MAX_TOKENS_TOO_LARGE,
            f"{ask.max_tokens} and a prompt of {ask.num_prompt_tokens} tokens do not fit: {limit}; "
            f"at most {room} are left for this prompt",
        )
    return Admit(room if ask.max_tokens is None else ask.max_tokens)


def _queue_has_room(ask: Ask, load: QueueLoad, limits: Limits) -> Reject | None:
    if load.num_requests + ask.num_completions > limits.max_queued_requests:
        return Reject(
            Reason.QUEUE_FULL,
            f"{load.num_requests} requests wait here and {limits.max_queued_requests} may; "
            "try again later",
            1.0,
        )
    num_tokens = ask.num_prompt_tokens * ask.num_completions
    if load.num_tokens + num_tokens > limits.max_queued_tokens:
        return Reject(
            Reason.QUEUE_FULL,
            f"prompts of {load.num_tokens} tokens wait here and {limits.max_queued_tokens} may; "
            "try again later",
            1.0,
        )
    return None
