"""Plans that the worker receives and results that the worker returns, as columns over rows.

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
    """A plan that contradicts itself or the worker's rows; no part of the plan may be executed."""


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
class AssignedRequest:
    """A request that a plan assigns to a row; token_ids is [num_tokens], prompt then output."""

    row: int
    request_id: str
    token_ids: Int32Array
    num_prompt_tokens: int
    sampling: SamplingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedPlan:
    """A plan as received: freed_rows are applied first, row_requests next, appended blocks last."""

    step_id: int
    freed_rows: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_freed]
    row_requests: tuple[AssignedRequest, ...] = ()
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
    wants_audit: bool = False  # asks for ExecutedStep.audit

    @property
    def num_reqs(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log probabilities of some tokens and of the likeliest ones at their positions."""

    token_ids: Int32Array  # [num_tokens]
    logprobs: Float32Array  # [num_tokens] natural log, before temperature and truncation
    ranks: Int32Array  # [num_tokens] from 1
    top_token_ids: Int32Array  # [num_tokens, k] best first
    top_logprobs: Float32Array  # [num_tokens, k]


@dataclass(frozen=True, slots=True)
class RowLogprobColumns:
    """Log probabilities of one row; a part is None if not asked for or not computed."""

    row: int
    tokens: LogprobColumns | None
    prompt_tokens: LogprobColumns | None


@dataclass(frozen=True, slots=True)
class RowError:
    """A row whose request failed in this step; the other rows are good."""

    row: int
    message: str


@dataclass(frozen=True, slots=True)
class OccupiedRows:
    """The rows that hold a request, and their block tables, row after row."""

    rows: Int32Array  # [num_rows] ascending
    num_blocks: Int32Array  # [num_rows]
    block_ids: Int32Array  # [sum(num_blocks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutedStep:
    """What a step produced, in the plan's order.

    Rows with an unfinished prefill and failed rows have 0 tokens.
    """

    step_id: int
    num_sampled_tokens: Int32Array  # [num_reqs]
    token_ids: Int32Array  # [sum(num_sampled_tokens)]
    num_draft_tokens: Int32Array = field(default_factory=lambda: EMPTY_INT32)  # [num_reqs] or [0]
    draft_token_ids: Int32Array = field(default_factory=lambda: EMPTY_INT32)
    logprobs: tuple[RowLogprobColumns, ...] = ()
    errors: tuple[RowError, ...] = ()
    elapsed_s: float = 0.0
    audit: OccupiedRows | None = None  # as they are after the plan; only if the plan asked
