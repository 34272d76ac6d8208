"""Runs the model: one plan in, one forward pass over its flat mixed batch, one result out.

The runner owns the rows and the KV pool and is used by one thread. It knows no wire and no
schedule.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.attention.interface import AttentionBackend, LayerKv, StepShape
from gpuworker.core.input_batch import BatchLimits, FlatBatch, InputBatch
from gpuworker.core.ngram import propose
from gpuworker.core.plan import (
    EMPTY_INT32,
    Int32Array,
    LogprobColumns,
    RowError,
    RowLogprobs,
    StepPlan,
    StepResult,
)
from gpuworker.models.decoder import Decoder
from gpuworker.models.linear import padded_rows
from gpuworker.sampling.logprobs import join, logprob_columns, take
from gpuworker.sampling.sampler import SampledTokens, sample

# Prompt log probabilities need logits of whole prompts: 256 rows of 150,000 tokens are 150 MB.
_MAX_PROMPT_LOGITS = 256


class ModelRunner:
    """The model, its rows and its KV pool.

    Args:
        decoder: the model.
        attention: the backend.
        kv: one pool per layer; changed by every step.
        limits: sizes of the rows and of the pool.
        clock: seconds, for elapsed_s.
        num_spec_tokens: at most so many drafts are proposed for each row; 0 is none.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: AttentionBackend,
        kv: Sequence[LayerKv],
        limits: BatchLimits,
        clock: Callable[[], float],
        num_spec_tokens: int = 0,
    ) -> None:
        self.limits = limits
        self._decoder = decoder
        self._attention = attention
        self._kv = kv
        self._rows = InputBatch(limits)
        self._clock = clock
        self._num_spec_tokens = num_spec_tokens

    @property
    def num_spec_tokens(self) -> int:
        """Drafts proposed for a row after a step, at most."""
        return self._num_spec_tokens

    @property
    def num_requests(self) -> int:
        """Rows that hold a request."""
        return int(self._rows.slots.is_occupied.sum())

    def reset(self) -> None:
        """Empties every row, as a new stream begins."""
        self._rows.clear()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step.

        Raises:
            PlanError: the plan contradicts itself or the rows.
        """
        started = self._clock()
        batch = self._rows.apply(plan)
        if batch.num_tokens == 0:
            return StepResult(
                step_id=plan.step_id,
                num_sampled_tokens=batch.num_samples,
                token_ids=batch.draft_token_ids,
                elapsed_s=self._clock() - started,
            )
        hidden = self._forward(batch)
        prompt_logprobs = self._prompt_logprobs(batch, hidden)
        logits = self._logits(hidden, batch.logits_indices)
        asked = self._raw_logits_if_asked(batch, logits)
        sampled = sample(logits, batch, self._rows)
        counts, errors = _accept(batch, sampled)
        token_ids = sampled.token_ids[_kept(batch.num_samples, counts)]
        self._rows.append_sampled(batch.rows, counts, token_ids)
        self._fill_in([error.row for error in errors])
        num_drafts, drafts = self._propose(batch, counts)
        return StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=counts,
            token_ids=token_ids,
            num_draft_tokens=num_drafts,
            draft_token_ids=drafts,
            logprobs=self._row_logprobs(batch, asked, sampled, counts, prompt_logprobs),
            errors=errors,
            elapsed_s=self._clock() - started,
        )

    def _fill_in(self, failed_rows: list[int]) -> None:
        """Gives failed rows a token of no meaning: a plan for them may already be on its way."""
        if failed_rows:
            ones = np.ones(len(failed_rows), dtype=np.int32)
            self._rows.append_sampled(np.array(failed_rows, dtype=np.int32), ones, 0 * ones)

    def _forward(self, batch: FlatBatch) -> torch.Tensor:
        """Hidden states of the batch's tokens: [num_padded_tokens, hidden_size]."""
        device = self._decoder.device
        num_padded = padded_rows(batch.num_tokens)
        padding = (0, num_padded - batch.num_tokens)
        token_ids = torch.from_numpy(np.pad(batch.token_ids, padding)).to(device)
        positions = torch.from_numpy(np.pad(batch.positions, padding)).to(device)
        prepared = self._attention.prepare(StepShape.of(batch, num_padded))
        return self._decoder.forward(token_ids, positions, self._kv, prepared)

    def _logits(self, hidden: torch.Tensor, indices: NDArray[np.int64]) -> torch.Tensor:
        """Logits of some tokens: [len(indices), vocab_size]."""
        if not len(indices):
            return torch.empty(0, self.limits.vocab_size, device=hidden.device)
        padding = (0, padded_rows(len(indices)) - len(indices))
        rows = torch.from_numpy(np.pad(indices, padding)).to(hidden.device)
        return self._decoder.logits(hidden.index_select(0, rows))[: len(indices)]

    def _propose(self, batch: FlatBatch, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Drafts for rows that sampled: how many for each, [num_reqs] or [0], and all of them."""
        if not self._num_spec_tokens:
            return EMPTY_INT32, EMPTY_INT32
        drafts = [EMPTY_INT32] * batch.num_reqs
        for i in np.flatnonzero(counts).tolist():
            row = int(batch.rows[i])
            num_tokens = int(self._rows.num_tokens[row])
            room = self.limits.max_model_len - num_tokens - 1
            drafts[i] = propose(
                self._rows.token_ids[row, :num_tokens], min(self._num_spec_tokens, room)
            )
        num_drafts = np.array([len(draft) for draft in drafts], dtype=np.int32)
        return num_drafts, np.concatenate(drafts)

    def _raw_logits_if_asked(self, batch: FlatBatch, logits: torch.Tensor) -> torch.Tensor | None:
        """A copy of the logits, which sampling changes, when a row wants log probabilities."""
        is_asked = (self._rows.slots.num_logprobs[batch.sample_rows] >= 0).any()
        return logits.clone() if is_asked else None

    def _row_logprobs(
        self,
        batch: FlatBatch,
        logits: torch.Tensor | None,
        sampled: SampledTokens,
        counts: Int32Array,
        prompt_logprobs: dict[int, LogprobColumns],
    ) -> tuple[RowLogprobs, ...]:
        """Log probabilities of every row that asked for any and has some in this step."""
        if logits is None and not prompt_logprobs:
            return ()
        wanted = self._rows.slots.num_logprobs[batch.rows]
        columns = None
        if logits is not None:
            tokens = torch.from_numpy(sampled.token_ids.astype(np.int64)).to(logits.device)
            columns = logprob_columns(logits, tokens, int(wanted.max()))
        starts = np.cumsum(batch.num_samples) - batch.num_samples
        rows = []
        for i, row in enumerate(batch.rows.tolist()):
            of_tokens = None
            if columns is not None and wanted[i] >= 0 and counts[i]:
                index = slice(int(starts[i]), int(starts[i] + counts[i]))
                of_tokens = take(columns, index, int(wanted[i]))
            of_prompt = prompt_logprobs.get(row)
            if of_tokens is not None or of_prompt is not None:
                rows.append(RowLogprobs(row, of_tokens, of_prompt))
        return tuple(rows)

    def _prompt_logprobs(self, batch: FlatBatch, hidden: torch.Tensor) -> dict[int, LogprobColumns]:
        """Log probabilities of the prompt tokens that this step computed, by row."""
        columns_by_row = {}
        for row in np.unique(batch.prompt_rows).tolist():
            places = np.flatnonzero(batch.prompt_rows == row)
            num_top = int(self._rows.slots.num_prompt_logprobs[row])
            parts = []
            for start in range(0, len(places), _MAX_PROMPT_LOGITS):
                piece = places[start : start + _MAX_PROMPT_LOGITS]
                logits = self._logits(hidden, batch.prompt_indices[piece])
                targets = torch.from_numpy(batch.prompt_target_ids[piece]).to(logits.device)
                parts.append(logprob_columns(logits, targets, num_top))
            columns_by_row[row] = join(parts)
        return columns_by_row


def _accept(batch: FlatBatch, sampled: SampledTokens) -> tuple[Int32Array, tuple[RowError, ...]]:
    """How many of each row's samples count: up to and with the first that differs from its draft.

    What was sampled after an accepted draft is what would have been sampled without drafts: the
    same logits, settings, seed and position. A row with logits that are not finite gets none.
    """
    counts = batch.num_samples
    if len(batch.draft_token_ids):
        counts = counts.copy()
        ends = np.cumsum(batch.num_samples)
        draft_starts = np.cumsum(batch.num_draft_tokens) - batch.num_draft_tokens
        for i in np.flatnonzero(batch.num_draft_tokens).tolist():
            num_drafts = int(batch.num_draft_tokens[i])
            first = int(ends[i]) - num_drafts - 1
            drafts = batch.draft_token_ids[draft_starts[i] : draft_starts[i] + num_drafts]
            is_match = sampled.token_ids[first : first + num_drafts] == drafts
            counts[i] = 1 + (num_drafts if is_match.all() else int(is_match.argmin()))
    if sampled.is_finite.all():
        return counts, ()
    row_of_sample = np.repeat(np.arange(batch.num_reqs), batch.num_samples)
    failed = np.unique(row_of_sample[~sampled.is_finite])
    counts = counts.copy()
    counts[failed] = 0
    message = "the model's logits are not finite"
    return counts, tuple(RowError(int(row), message) for row in batch.rows[failed])


def _kept(num_samples: Int32Array, counts: Int32Array) -> NDArray[np.bool_]:
    """Which samples count: the first `counts` of each row's, [sum(num_samples)]."""
    ends = np.cumsum(num_samples)
    ranks = np.arange(int(num_samples.sum())) - np.repeat(ends - num_samples, num_samples)
    is_kept: NDArray[np.bool_] = ranks < np.repeat(counts, num_samples)
    return is_kept
