"""Runs the model: one plan in, one forward pass over its flat mixed batch, one result out.

A step has two halves. `launch` applies a plan, starts all device work and the copy of the results,
and waits for nothing; `PendingStep.finish` waits for that copy. The next plan may be
launched in between: its input tokens that are not known on the host yet are read on the device. The
runner owns the rows and the KV pool and is used by one thread. The runner knows no wire format and
no schedule.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.core.input_batch import BatchLimits, FlatBatch, InputBatch, OpenTokens
from gpuworker.core.ngram import propose
from gpuworker.core.plan import (
    EMPTY_INT32,
    ExecutedStep,
    Int32Array,
    LogprobColumns,
    OccupiedRows,
    ReceivedPlan,
    RowError,
    RowLogprobColumns,
)
from gpuworker.core.ragged import ranks, starts
from gpuworker.device.transfers import DeviceEvent, Transfers
from gpuworker.forward import Forward, Outputs
from gpuworker.sampling.logprobs import join, start_logprobs, take
from gpuworker.sampling.sampler import SampledTokens, Sampler

# Prompt log probabilities need logits of whole prompts: 256 rows of 150,000 tokens are 150 MB.
_MAX_PROMPT_LOGITS = 256
# With more steps in flight, the last two tokens of a row could be unknown.
_MAX_PENDING = 2


class PendingStep:
    """A step that was launched and is not finished."""

    def __init__(
        self, copied: DeviceEvent, complete: Callable[["PendingStep"], ExecutedStep]
    ) -> None:
        self._copied = copied
        self._complete = complete
        self._result: ExecutedStep | None = None

    @property
    def is_done(self) -> bool:
        """Whether the device has completed the step; may be called from any thread."""
        return self._copied.query()

    def wait(self) -> None:
        """Waits until the device has completed the step; may be called from any thread."""
        self._copied.synchronize()

    def finish(self) -> ExecutedStep:
        """The result of the step; finishes earlier steps first. Called on the runner's thread."""
        if self._result is None:
            self._copied.synchronize()
            self._result = self._complete(self)
        return self._result


@dataclass(frozen=True, slots=True)
class _Launched:
    """The parts of a launched step that finishing needs.

    packed: [2 * num_samples, then num_reqs where drafts are verified] int32 tokens, whether their
        logits are finite, and how many of each request's are kept.
    open_tokens: None where drafts are verified, because the number of tokens is not known yet.
    """

    batch: FlatBatch
    started_s: float
    packed: torch.Tensor
    open_tokens: OpenTokens | None
    num_logprobs: Int32Array  # [num_reqs] asked for; negative: none
    logprobs: LogprobColumns | None
    prompt_logprobs: dict[int, list[LogprobColumns]]  # by row
    audit: OccupiedRows | None


class ModelRunner:
    """The model and its rows.

    Args:
        forward: the model.
        sampler: chooses tokens.
        transfers: copies to the device and back.
        limits: sizes of the rows and of the pool.
        clock: seconds, for elapsed_s.
        num_spec_tokens: at most so many drafts are proposed for each row; 0 is none.
    """

    def __init__(
        self,
        forward: Forward,
        sampler: Sampler,
        transfers: Transfers,
        limits: BatchLimits,
        *,
        clock: Callable[[], float],
        num_spec_tokens: int = 0,
    ) -> None:
        self.limits = limits
        self.forward = forward
        self._sampler = sampler
        self._transfers = transfers
        self._rows = InputBatch(limits)
        self._clock = clock
        self._num_spec_tokens = num_spec_tokens
        self._pending: deque[PendingStep] = deque()
        self._has_drafts_pending = False

    @property
    def num_spec_tokens(self) -> int:
        """Drafts proposed for a row after a step, at most."""
        return self._num_spec_tokens

    @property
    def num_requests(self) -> int:
        """Rows that hold a request."""
        return int(self._rows.slots.is_occupied.sum())

    def reset(self) -> None:
        """Empties every row for a new stream; results of launched steps are dropped."""
        self._pending.clear()
        self._rows.clear()

    def execute(self, plan: ReceivedPlan) -> ExecutedStep:
        """Runs one step from beginning to end; see `launch`."""
        return self.launch(plan).finish()

    @torch.inference_mode()
    def launch(self, plan: ReceivedPlan) -> PendingStep:
        """Starts one step.

        Steps in flight are finished first if one verifies drafts (only its result tells how many
        tokens its rows have) or if a request has bad words (they depend on the last tokens).
        Otherwise at most the older of two steps is finished first.

        Raises:
            PlanError: the plan contradicts itself or the rows.
        """
        started_s = self._clock()
        most = 0 if self._has_drafts_pending or self._rows.slots.looks_back else _MAX_PENDING - 1
        while len(self._pending) > most:
            self._pending[0].finish()
        batch = self._rows.apply(plan)
        self._sampler.reset_rows(plan.row_requests, self._rows)
        audit = self._rows.occupied_rows() if plan.wants_audit else None
        if batch.num_tokens == 0:
            return PendingStep(
                self._transfers.mark(), lambda _: self._nothing(batch, started_s, audit)
            )
        launched = self._start(batch, started_s, audit)
        step = PendingStep(self._transfers.mark(), lambda step: self._complete(step, launched))
        self._pending.append(step)
        self._has_drafts_pending = launched.open_tokens is None
        return step

    def _nothing(
        self, batch: FlatBatch, started_s: float, audit: OccupiedRows | None
    ) -> ExecutedStep:
        """The result of a step that schedules no tokens."""
        return ExecutedStep(
            step_id=batch.step_id,
            num_sampled_tokens=batch.num_samples,
            token_ids=EMPTY_INT32,
            elapsed_s=self._clock() - started_s,
            audit=audit,
        )

    def _start(self, batch: FlatBatch, started_s: float, audit: OccupiedRows | None) -> _Launched:
        """Starts all device work of a step, and the copies of its results to the host."""
        outputs = self.forward.run(batch, self._rows.slots)
        prompt_logprobs = self._start_prompt_logprobs(batch, outputs)
        num_logprobs = self._rows.slots.num_logprobs[batch.rows]
        is_asked = bool((num_logprobs >= 0).any()) and len(outputs.logits) > 0
        # Sampling changes the logits.
        raw_logits = outputs.logits.clone() if is_asked else None
        sampled = self._sampler.sample(outputs.logits, outputs.samples, batch, self._rows)
        logprobs = None
        if raw_logits is not None:
            num_top = int(num_logprobs.max())
            token_ids = sampled.token_ids.long()
            logprobs = start_logprobs(raw_logits, token_ids, num_top, self._transfers)
        open_tokens = None if len(batch.draft_token_ids) else self._rows.open(batch)
        return _Launched(
            batch,
            started_s,
            self._transfers.to_host(_packed(sampled)),
            open_tokens,
            num_logprobs,
            logprobs,
            prompt_logprobs,
            audit,
        )

    def _start_prompt_logprobs(
        self, batch: FlatBatch, outputs: Outputs
    ) -> dict[int, list[LogprobColumns]]:
        """Log probabilities of the prompt tokens that this step computes, by row, in pieces."""
        pieces_by_row: dict[int, list[LogprobColumns]] = {}
        to_device = self._transfers.to_device
        for row in np.unique(batch.prompt_rows).tolist():
            assert outputs.hidden is not None, "a replayed step computes no prompt tokens"
            indices = np.flatnonzero(batch.prompt_rows == row)
            num_top = int(self._rows.slots.num_prompt_logprobs[row])
            pieces_by_row[row] = []
            for start in range(0, len(indices), _MAX_PROMPT_LOGITS):
                piece = indices[start : start + _MAX_PROMPT_LOGITS]
                logits = self.forward.logits(outputs.hidden, to_device(batch.prompt_indices[piece]))
                targets = to_device(batch.prompt_target_ids[piece])
                pieces_by_row[row].append(start_logprobs(logits, targets, num_top, self._transfers))
        return pieces_by_row

    @torch.inference_mode()
    def _complete(self, step: PendingStep, launched: _Launched) -> ExecutedStep:
        """Reads a step's results and appends its tokens to the rows."""
        while step in self._pending and self._pending[0] is not step:
            self._pending[0].finish()
        batch = launched.batch
        counts, sampled_ids, errors = _unpacked(launched)
        token_ids = sampled_ids
        if counts is not batch.num_samples:
            token_ids = sampled_ids[_kept(batch.num_samples, counts)]
        if launched.open_tokens is not None:
            # A failed row gets the placeholder 0: a plan that advances it may already be launched.
            self._rows.settle(launched.open_tokens, sampled_ids)
        else:
            self._rows.append_sampled(batch.rows, counts, token_ids)
            self._fill_in([error.row for error in errors])
            self._sampler.count_accepted(batch, counts, token_ids, self._rows)
        if step in self._pending:
            self._pending.remove(step)
        num_drafts, drafts = self._propose(batch, counts)
        return ExecutedStep(
            step_id=batch.step_id,
            num_sampled_tokens=counts,
            token_ids=token_ids,
            num_draft_tokens=num_drafts,
            draft_token_ids=drafts,
            logprobs=_row_logprobs(launched, counts),
            errors=errors,
            elapsed_s=self._clock() - launched.started_s,
            audit=launched.audit,
        )

    def _fill_in(self, failed_rows: list[int]) -> None:
        """Appends a placeholder token to failed rows: a plan that advances them may be launched."""
        if failed_rows:
            ones = np.ones(len(failed_rows), dtype=np.int32)
            self._rows.append_sampled(np.array(failed_rows, dtype=np.int32), ones, 0 * ones)

    def _propose(self, batch: FlatBatch, counts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Drafts for rows that sampled: how many for each, [num_reqs] or [0], and all of them.

        No drafts are proposed while another step is in flight, which could not use them.
        """
        if not self._num_spec_tokens or self._pending:
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


def _packed(sampled: SampledTokens) -> torch.Tensor:
    """The tokens of a step, packed for one copy to the host; see `_Launched`."""
    parts = [sampled.token_ids, sampled.is_finite.int()]
    if sampled.num_kept is not None:
        parts.append(sampled.num_kept)
    return torch.cat(parts)


def _unpacked(launched: _Launched) -> tuple[Int32Array, Int32Array, tuple[RowError, ...]]:
    """How many of each row's samples count, all samples, and the rows that failed.

    A row whose logits are not finite has no samples that count.
    """
    batch, values = launched.batch, launched.packed.numpy()
    num_samples = len(batch.sample_rows)
    is_finite = values[num_samples : 2 * num_samples] != 0
    counts = batch.num_samples
    if len(values) > 2 * num_samples:
        counts = values[2 * num_samples :]
    if is_finite.all():
        return counts, values[:num_samples], ()
    row_of_sample = np.repeat(np.arange(batch.num_reqs), batch.num_samples)
    failed = np.unique(row_of_sample[~is_finite])
    counts = counts.copy()
    counts[failed] = 0
    message = "the model's logits are not finite"
    errors = tuple(RowError(int(row), message) for row in batch.rows[failed])
    return counts, values[:num_samples], errors


def _kept(num_samples: Int32Array, counts: Int32Array) -> NDArray[np.bool_]:
    """Which samples count: the first `counts` of each row's, [sum(num_samples)]."""
    is_kept: NDArray[np.bool_] = ranks(num_samples) < np.repeat(counts, num_samples)
    return is_kept


def _row_logprobs(launched: _Launched, counts: Int32Array) -> tuple[RowLogprobColumns, ...]:
    """Log probabilities of every row that asked for any and has some in this step."""
    if launched.logprobs is None and not launched.prompt_logprobs:
        return ()
    batch, wanted = launched.batch, launched.num_logprobs
    columns, first_samples = launched.logprobs, starts(batch.num_samples).tolist()
    rows = []
    for i, row in enumerate(batch.rows.tolist()):
        of_tokens: LogprobColumns | None = None
        if columns is not None and wanted[i] >= 0 and counts[i]:
            index = slice(first_samples[i], first_samples[i] + int(counts[i]))
            of_tokens = take(columns, index, int(wanted[i]))
        of_prompt: LogprobColumns | None = None
        if row in launched.prompt_logprobs:
            of_prompt = join(launched.prompt_logprobs[row])
        if of_tokens is not None or of_prompt is not None:
            rows.append(RowLogprobColumns(row, of_tokens, of_prompt))
    return tuple(rows)
