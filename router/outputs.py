"""What a scheduler reports of completions: new tokens, admissions, ends, refusals.

Log probabilities are in the form of the wire, and pass through unread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.vocabulary import FinishReason, RefusalReason

_ENDED_WELL = frozenset({FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION})


@dataclass(frozen=True, slots=True)
class CompletionFinish:
    """How a completion ended; message is for a person, num_preemptions the scheduler's count."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop: str | None = None
    message: str = ""
    num_preemptions: int = 0

    @property
    def is_well(self) -> bool:
        """Whether the completion is whole."""
        return self.reason in _ENDED_WELL


@dataclass(frozen=True, slots=True)
class Admitted:
    """A scheduler admitted a completion (gave it KV blocks) for the first time."""

    handle: int
    num_cached_tokens: int
    time_unix_s: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities of a completion's new tokens, and of its prompt, once.

    Each is encoded as on the wire: a decoded message would keep its whole step in memory.
    """

    handle: int
    tokens: Sequence[bytes]
    prompt_tokens: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutputs:
    """One step's outputs for this router: columns over the completions that got tokens."""

    handles: Sequence[int]  # [num_completions]
    num_new_tokens: Sequence[int]  # [num_completions]
    token_ids: Sequence[int]  # [sum(num_new_tokens)]
    # [num_completions] drafts verified and accepted, or [0] when there were none.
    draft_counts: Sequence[tuple[int, int]] = ()
    finish_by_handle: Mapping[int, CompletionFinish] = field(default_factory=dict)
    admissions: Sequence[Admitted] = ()
    logprobs: Sequence[Logprobs] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A scheduler refused a completion; reason None is one that only a newer scheduler knows.

    field is what is wrong of the submission where reason is INVALID.
    """

    handle: int
    reason: RefusalReason | None
    message: str
    field: str = ""
