"""The persistent input batch: what each row holds, and the flat batch of one step.

Rows keep their tokens and block tables between steps; a plan only brings changes, and the flat
batch is gathered from the rows with vector operations. It decides nothing about the schedule: a
plan that does not fit the rows is refused as a PlanError.
"""

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from gpuworker.core.plan import Int32Array, Int64Array, PlanError, RowRequest, StepPlan
from gpuworker.core.request_slots import RequestSlots

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Sizes of the persistent batch; num_kv_blocks counts the reserved null block 0."""

    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    block_size: int
    num_kv_blocks: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatBatch:
    """One step's tokens, request after request in the plan's order.

    A row that reaches its last known token samples once there and once more after each draft;
    `sample_*` columns have one entry per such place.
    """

    step_id: int
    rows: Int32Array  # [num_reqs]
    query_start_loc: Int32Array  # [num_reqs + 1] prefix sum of scheduled tokens
    seq_lens: Int32Array  # [num_reqs] context length after this step, drafts included
    token_ids: Int32Array  # [num_tokens]; negative: not known here yet, see `unknown_token`
    positions: Int64Array  # [num_tokens]
    slot_mapping: Int64Array  # [num_tokens] block_id * block_size + offset
    block_table: Int32Array  # [num_reqs, max_blocks of these rows]; unused entries are 0
    num_samples: Int32Array  # [num_reqs] 0 for an unfinished prefill, else 1 + drafts
    logits_indices: Int64Array  # [num_samples] index into token_ids whose logits are sampled
    sample_rows: Int32Array  # [num_samples] row of each
    sample_positions: Int64Array  # [num_samples] how many output tokens precede it
    sample_num_tokens: Int64Array  # [num_samples] tokens of the row before it, drafts included
    num_draft_tokens: Int32Array  # [num_reqs]
    draft_token_ids: Int32Array  # [sum(num_draft_tokens)]
    prompt_indices: Int64Array  # [num_prompt_logprobs] index into token_ids, see `prompt_rows`
    prompt_rows: Int32Array  # rows that asked for log probabilities of their prompt, one per index
    prompt_target_ids: Int64Array  # the prompt token that follows each index

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class OpenTokens:
    """Tokens that a step on its way will give: [num_open] each.

    A row may be another request's by the time its token is known; tenancies tell.
    """

    rows: Int32Array
    columns: Int32Array  # where in its row's tokens each goes
    tenancies: Int32Array  # how many requests the row had had


def unknown_token(row: Int32Array) -> Int32Array:
    """What stands for a row's last token while only the device knows it: -1 - row."""
    return ~row


class InputBatch:
    """Tokens and block tables of every row, kept between steps.

    Owned by the thread that runs the model; nothing here is shared.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.slots = RequestSlots(limits.max_num_seqs, limits.vocab_size, limits.eos_token_ids)
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        # One column more than max_model_len: the token sampled at the limit still has a place.
        self.token_ids: Int32Array = np.zeros(
            (limits.max_num_seqs, limits.max_model_len + 1), dtype=np.int32
        )
        self._block_table: Int32Array = np.zeros(
            (limits.max_num_seqs, self._max_blocks), dtype=np.int32
        )
        self._num_blocks: Int32Array = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._tenancies: Int32Array = np.zeros(limits.max_num_seqs, dtype=np.int32)

    def clear(self) -> None:
        """Empties every row."""
        self.slots.clear()
        self._block_table[:] = NULL_BLOCK
        self._num_blocks[:] = 0

    def apply(self, plan: StepPlan) -> FlatBatch:
        """Applies a plan's changes to the rows and gathers its flat batch.

        Raises:
            PlanError: the plan contradicts itself or the rows. Rows may have changed by then, so
                the stream that sent it must be ended.
        """
        self._free(plan.freed_rows)
        for request in plan.row_requests:
            self._place(request)
        self._append_blocks(plan.appended_block_rows, plan.appended_block_ids)
        num_draft_tokens = self._check_columns(plan)
        self._check_rows(plan, num_draft_tokens)
        return self._gather(plan, num_draft_tokens)

    def open(self, batch: FlatBatch) -> OpenTokens:
        """Gives every row that samples its next token, which is not known yet.

        The rows' last tokens must be known or fed by the device; no row may have drafts.
        """
        rows = batch.sample_rows
        columns = self.num_tokens[rows]
        self.token_ids[rows, columns] = unknown_token(rows)
        self.num_tokens[rows] = columns + 1
        return OpenTokens(rows, columns, self._tenancies[rows])

    def settle(self, tokens: OpenTokens, token_ids: Int32Array) -> None:
        """Fills in tokens that are known by now, in rows that are still the same request's."""
        is_same = self._tenancies[tokens.rows] == tokens.tenancies
        if is_same.all():
            self.token_ids[tokens.rows, tokens.columns] = token_ids
        else:
            rows, columns = tokens.rows[is_same], tokens.columns[is_same]
            self.token_ids[rows, columns] = token_ids[is_same]

    def append_sampled(
        self, rows: Int32Array, num_sampled_tokens: Int32Array, token_ids: Int32Array
    ) -> None:
        """Appends each row's sampled tokens to it.

        Args:
            rows: [num_reqs] distinct rows.
            num_sampled_tokens: [num_reqs] how many of token_ids belong to each.
            token_ids: [sum(num_sampled_tokens)] row after row.
        """
        row_of_token = _repeated(rows, num_sampled_tokens)
        columns = self.num_tokens[row_of_token] + _ranks(num_sampled_tokens)
        fits = columns < self.token_ids.shape[1]
        self.token_ids[row_of_token[fits], columns[fits]] = token_ids[fits]
        self.num_tokens[rows] = np.minimum(
            self.num_tokens[rows] + num_sampled_tokens, self.token_ids.shape[1]
        )

    def _free(self, rows: Int32Array) -> None:
        if not len(rows):
            return
        self.slots.free(rows)
        self._block_table[rows] = NULL_BLOCK
        self._num_blocks[rows] = 0

    def _place(self, request: RowRequest) -> None:
        tokens = request.token_ids
        name = request.request_id
        if not 0 < request.num_prompt_tokens <= len(tokens) <= self.limits.max_model_len:
            raise PlanError(
                f"row_requests: {name!r} has {len(tokens)} tokens of which "
                f"{request.num_prompt_tokens} are its prompt; at least 1 and at most "
                f"max_model_len {self.limits.max_model_len} can be placed"
            )
        if tokens.min() < 0 or tokens.max() >= self.limits.vocab_size:
            raise PlanError(
                f"row_requests: {name!r} has token ids outside [0, {self.limits.vocab_size})"
            )
        self.slots.place(request)
        self.token_ids[request.row, : len(tokens)] = tokens
        self.num_tokens[request.row] = len(tokens)
        self.num_prompt_tokens[request.row] = request.num_prompt_tokens
        self._tenancies[request.row] += 1

    def _append_blocks(self, rows: Int32Array, block_ids: Int32Array) -> None:
        if len(rows) != len(block_ids):
            raise PlanError(
                f"appended_block_ids: {len(block_ids)} blocks for {len(rows)} appended_block_rows"
            )
        if not len(rows):
            return
        # A row may get several blocks: rank them within their row, in order.
        order = np.argsort(rows, kind="stable")
        distinct, counts = np.unique(rows, return_counts=True)
        self.slots.check_occupied(distinct.astype(np.int32), "appended_block_rows")
        if block_ids.min() <= NULL_BLOCK or block_ids.max() >= self.limits.num_kv_blocks:
            raise PlanError(
                f"appended_block_ids: blocks must be in [1, {self.limits.num_kv_blocks})"
            )
        if (self._num_blocks[distinct] + counts > self._max_blocks).any():
            raise PlanError(
                f"appended_block_rows: a row would hold more than {self._max_blocks} blocks"
            )
        sorted_rows = rows[order]
        columns = self._num_blocks[sorted_rows] + _ranks(counts)
        self._block_table[sorted_rows, columns] = block_ids[order]
        self._num_blocks[distinct] += counts.astype(np.int32)

    def _check_columns(self, plan: StepPlan) -> Int32Array:
        """Checks lengths and signs; returns num_draft_tokens as [num_reqs]."""
        num_reqs = plan.num_reqs
        for name in ("num_computed_tokens", "num_scheduled_tokens"):
            if len(getattr(plan, name)) != num_reqs:
                raise PlanError(f"{name}: {len(getattr(plan, name))} values for {num_reqs} rows")
        drafts = plan.num_draft_tokens
        if not len(drafts):
            drafts = np.zeros(num_reqs, dtype=np.int32)
        if len(drafts) != num_reqs or drafts.sum() != len(plan.draft_token_ids):
            raise PlanError(
                f"num_draft_tokens: {len(drafts)} values summing to {int(drafts.sum())} for "
                f"{num_reqs} rows and {len(plan.draft_token_ids)} draft_token_ids"
            )
        self.slots.check_occupied(plan.rows, "rows")
        if not num_reqs:
            return drafts
        if plan.num_computed_tokens.min() < 0:
            raise PlanError("num_computed_tokens: must be >= 0")
        if (plan.num_scheduled_tokens <= drafts).any() or drafts.min() < 0:
            raise PlanError("num_scheduled_tokens: must exceed num_draft_tokens, which is >= 0")
        ids = plan.draft_token_ids
        if len(ids) and (ids.min() < -1 or ids.max() >= self.limits.vocab_size):
            raise PlanError(f"draft_token_ids: must be in [-1, {self.limits.vocab_size})")
        total = int(plan.num_scheduled_tokens.sum())
        if total > self.limits.max_num_batched_tokens:
            raise PlanError(
                f"num_scheduled_tokens: {total} in all, at most max_num_batched_tokens "
                f"{self.limits.max_num_batched_tokens}"
            )
        return drafts

    def _check_rows(self, plan: StepPlan, num_draft_tokens: Int32Array) -> None:
        """Checks the plan against what the rows hold."""
        rows = plan.rows
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        known = ends - num_draft_tokens
        num_tokens = self.num_tokens[rows]
        room = np.minimum(
            self._num_blocks[rows] * self.limits.block_size, self.limits.max_model_len
        )
        is_bad = (known > num_tokens) | (ends > room)
        if len(plan.draft_token_ids):
            is_bad |= (num_draft_tokens > 0) & (known != num_tokens)
        if is_bad.any():
            i = int(np.flatnonzero(is_bad)[0])
            self._refuse_row(plan, i, int(num_draft_tokens[i]))

    def _refuse_row(self, plan: StepPlan, i: int, num_drafts: int) -> NoReturn:
        """Says what is wrong with the i-th row of a plan."""
        row = int(plan.rows[i])
        computed = int(plan.num_computed_tokens[i])
        scheduled = int(plan.num_scheduled_tokens[i])
        num_tokens, num_blocks = int(self.num_tokens[row]), int(self._num_blocks[row])
        end = computed + scheduled
        if end - num_drafts > num_tokens:
            what = "is scheduled past the tokens it has"
        elif end > self.limits.max_model_len:
            what = "is scheduled past max_model_len"
        elif end > num_blocks * self.limits.block_size:
            what = "has too few KV blocks for its tokens"
        else:
            what = "has drafts before its last token is computed"
        raise PlanError(
            f"rows: row {row} ({self.slots.request_ids[row]!r}) {what}: {computed} computed + "
            f"{scheduled} scheduled, {num_drafts} of them drafts; it has {num_tokens} tokens and "
            f"{num_blocks} blocks"
        )

    def _gather(self, plan: StepPlan, num_draft_tokens: Int32Array) -> FlatBatch:
        rows, scheduled, computed = plan.rows, plan.num_scheduled_tokens, plan.num_computed_tokens
        num_tokens = self.num_tokens[rows]
        self._write_drafts(rows, num_tokens, num_draft_tokens, plan.draft_token_ids)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(scheduled, out=query_start_loc[1:])
        seq_lens = computed + scheduled
        row_of_token = _repeated(rows, scheduled)
        positions = _repeated(computed, scheduled).astype(np.int64) + _ranks(scheduled)
        block_of_token = self._block_table[row_of_token, positions // self.limits.block_size]
        slot_mapping = (
            block_of_token.astype(np.int64) * self.limits.block_size
            + positions % self.limits.block_size
        )
        max_blocks = int(self._num_blocks[rows].max()) if len(rows) else 0

        num_samples = np.where(
            seq_lens - num_draft_tokens == num_tokens, num_draft_tokens + 1, 0
        ).astype(np.int32)
        sample_ranks = _ranks(num_samples)
        sample_rows = _repeated(rows, num_samples)
        sample_num_tokens = _repeated(num_tokens, num_samples).astype(np.int64) + sample_ranks
        logits_indices = (
            _repeated(query_start_loc[1:] - num_samples, num_samples).astype(np.int64)
            + sample_ranks
        )
        prompt_indices, prompt_rows, prompt_targets = self._prompt_places(row_of_token, positions)
        return FlatBatch(
            step_id=plan.step_id,
            rows=rows,
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            token_ids=self.token_ids[row_of_token, positions],
            positions=positions,
            slot_mapping=slot_mapping,
            block_table=self._block_table[rows, :max_blocks],
            num_samples=num_samples,
            logits_indices=logits_indices,
            sample_rows=sample_rows,
            sample_positions=sample_num_tokens - self.num_prompt_tokens[sample_rows],
            sample_num_tokens=sample_num_tokens,
            num_draft_tokens=num_draft_tokens,
            draft_token_ids=plan.draft_token_ids,
            prompt_indices=prompt_indices,
            prompt_rows=prompt_rows,
            prompt_target_ids=prompt_targets,
        )

    def _write_drafts(
        self,
        rows: Int32Array,
        num_tokens: Int32Array,
        num_draft_tokens: Int32Array,
        draft_token_ids: Int32Array,
    ) -> None:
        """Puts drafts behind each row's tokens, where the gather finds them, uncounted."""
        if len(draft_token_ids):
            columns = np.repeat(num_tokens, num_draft_tokens) + _ranks(num_draft_tokens)
            row_of_draft = np.repeat(rows, num_draft_tokens)
            self.token_ids[row_of_draft, columns] = np.maximum(draft_token_ids, 0)

    def _prompt_places(
        self, row_of_token: Int32Array, positions: Int64Array
    ) -> tuple[Int64Array, Int32Array, Int64Array]:
        """Where prompt log probabilities are wanted: index, row, and the token that follows."""
        wants = self.slots.num_prompt_logprobs[row_of_token] >= 0
        if not wants.any():
            return _EMPTY_INT64, row_of_token[:0], _EMPTY_INT64
        wants &= positions + 1 < self.num_prompt_tokens[row_of_token]
        indices = np.flatnonzero(wants)
        prompt_rows = row_of_token[indices]
        targets = self.token_ids[prompt_rows, positions[indices] + 1].astype(np.int64)
        return indices, prompt_rows, targets


_EMPTY_INT64: Int64Array = np.empty(0, dtype=np.int64)


def _repeated(values: Int32Array, counts: Int32Array) -> Int32Array:
    """Each value as often as its count says."""
    return values if _is_all_ones(counts) else np.repeat(values, counts)


def _ranks(counts: Int32Array | Int64Array) -> Int64Array:
    """0, 1, ... within each group: [sum(counts)] for groups of `counts` members."""
    if _is_all_ones(counts):
        return np.zeros(len(counts), dtype=np.int64)
    total = int(counts.sum())
    starts: Int64Array = np.cumsum(counts, dtype=np.int64) - counts
    ranks: Int64Array = np.arange(total, dtype=np.int64) - np.repeat(starts, counts)
    return ranks


def _is_all_ones(counts: Int32Array | Int64Array) -> bool:
    """Whether there is nothing to repeat, as in a step of decodes only."""
    return bool((counts == 1).all())
