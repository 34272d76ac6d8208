"""Plans that the worker receives and results that it returns, as columns over the rows of a step.

A row is the scheduler's stable slot for a running request and the row of the worker's persistent
input batch.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from headrace.parameters import Numbers

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
Float32Array = NDArray[np.float32]

EMPTY_INT32: Int32Array = np.empty(0, dtype=np.int32)


class PlanError(Exception):
    """A plan that contradicts itself or the worker's rows; nothing of it may be executed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings(Numbers):
    """How a request's tokens are chosen; the defaults change nothing.

    num_logprobs and num_prompt_logprobs are None when not asked for; 0 asks for the chosen token's
    alone.
    """

    seed: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request placed in a row; token_ids is [num_tokens], prompt first, then its output."""

    row: int
    request_id: str
    token_ids: Int32Array
    num_prompt_tokens: int
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. freed_rows are applied first, then row_requests, then the appended blocks."""

    step_id: int
    freed_rows: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_freed]
    row_requests: tuple[RowRequest, ...] = ()
    appended_block_rows: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_appended]
    appended_block_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_appended]
    rows: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_reqs]
    num_computed_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_reqs]
    num_scheduled_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_reqs]
    # [num_reqs], or [0] when no row has drafts.
    num_draft_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    # [sum(num_draft_tokens)]; -1 is a placeholder that no sampled token ever equals.
    draft_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    traceparent: str = ""

    @property
    def num_reqs(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log probabilities of some tokens and of the likeliest ones in their places."""

    token_ids: Int32Array  # [num_tokens]
    logprobs: Float32Array  # [num_tokens] natural log, before temperature and truncation
    ranks: Int32Array  # [num_tokens] from 1
    top_token_ids: Int32Array  # [num_tokens, k] best first
    top_logprobs: Float32Array  # [num_tokens, k]


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of one row; None where not asked for or nothing was computed."""

    row: int
    tokens: LogprobColumns | None
    prompt_tokens: LogprobColumns | None


@dataclass(frozen=True, slots=True)
class RowError:
    """A row whose request failed in this step; the other rows are good."""

    row: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the plan's order; 0 tokens for an unfinished prefill or a failed row."""

    step_id: int
    num_sampled_tokens: Int32Array  # [num_reqs]
    token_ids: Int32Array  # [sum(num_sampled_tokens)]
    num_draft_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_reqs] or [0]
    draft_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    logprobs: tuple[RowLogprobs, ...] = ()
    errors: tuple[RowError, ...] = ()
    elapsed_s: float = 0.0
