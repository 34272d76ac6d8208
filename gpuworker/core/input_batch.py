"""The persistent input batch: what each row holds, and the flat batch of one step.

Rows keep their tokens and block tables between steps; a plan only brings changes, and the flat
batch is gathered from the rows with vector operations. The batch decides nothing about the
schedule: a plan that does not fit the rows is refused as a PlanError.
"""

from dataclasses import dataclass

import numpy as np

from gpuworker.core.plan import (
    EMPTY_INT32,
    AssignedRequest,
    Int32Array,
    Int64Array,
    OccupiedRows,
    PlanError,
    ReceivedPlan,
)
from gpuworker.core.plan_checks import check_columns, what_is_wrong
from gpuworker.core.ragged import is_all_ones, ranks, repeated
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
    `sample_*` columns have one entry per sample.
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
    sample_positions: Int64Array  # [num_samples] number of output tokens before the sample
    sample_num_tokens: Int64Array  # [num_samples] tokens of the row before the sample, with drafts
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
    """Tokens that a launched step will sample: [num_open] each.

    A row may belong to another request by the time its token is known; `tenancies` tells.
    """

    rows: Int32Array
    columns: Int32Array  # column of the row where the token belongs
    tenancies: Int32Array  # number of requests that the row had held at launch


def unknown_token(row: Int32Array) -> Int32Array:
    """The placeholder for a row's last token while only the device knows it: -1 - row."""
    return ~row


class InputBatch:
    """Tokens and block tables of every row, kept between steps.

    Owned by the thread that runs the model; nothing here is shared.
    """

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.slots = RequestSlots(limits.max_num_seqs, limits.vocab_size, limits.eos_token_ids)
        self._max_blocks = -(-limits.max_model_len // limits.block_size)
        # One column more than max_model_len, for the token that is sampled at the limit.
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
        # Batches hold slices of these arrays, which must not be written to.
        self._order: Int32Array = np.arange(limits.max_num_seqs + 1, dtype=np.int32)
        self._zeros: Int32Array = np.zeros(limits.max_num_seqs, dtype=np.int32)

    def clear(self) -> None:
        """Empties every row."""
        self.slots.clear()
        self._block_table[:] = NULL_BLOCK
        self._num_blocks[:] = 0

    def apply(self, plan: ReceivedPlan) -> FlatBatch:
        """Applies a plan's changes to the rows and gathers its flat batch.

        Raises:
            PlanError: the plan contradicts itself or the rows. Rows may have changed by then, so
                the stream that sent the plan must be ended.
        """
        self._free(plan.freed_rows)
        for request in plan.row_requests:
            self._assign(request)
        self._append_blocks(plan.appended_block_rows, plan.appended_block_ids)
        self.slots.check_occupied(plan.rows, "rows")
        num_draft_tokens = check_columns(
            plan, self.limits.vocab_size, self.limits.max_num_batched_tokens
        )
        self._check_rows(plan, num_draft_tokens)
        return self._gather(plan, num_draft_tokens)

    def open(self, batch: FlatBatch) -> OpenTokens:
        """Appends a placeholder for the next token of every row that samples.

        The rows' last tokens must be known or fed by the device; no row may have drafts.
        """
        rows = batch.sample_rows
        columns = self.num_tokens[rows]
        self.token_ids[rows, columns] = unknown_token(rows)
        self.num_tokens[rows] = columns + 1
        return OpenTokens(rows, columns, self._tenancies[rows])

    def settle(self, tokens: OpenTokens, token_ids: Int32Array) -> None:
        """Replaces placeholders by tokens, in rows that still hold the same request."""
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
        row_of_token = repeated(rows, num_sampled_tokens)
        columns = self.num_tokens[row_of_token] + ranks(num_sampled_tokens)
        fits = columns < self.token_ids.shape[1]
        self.token_ids[row_of_token[fits], columns[fits]] = token_ids[fits]
        self.num_tokens[rows] = np.minimum(
            self.num_tokens[rows] + num_sampled_tokens, self.token_ids.shape[1]
        )

    def occupied_rows(self) -> OccupiedRows:
        """What the rows hold now; a row with blocks but no request is given, too."""
        rows = np.flatnonzero(self.slots.is_occupied | (self._num_blocks > 0))
        num_blocks = self._num_blocks[rows]
        is_used = np.arange(self._max_blocks) < num_blocks[:, None]
        return OccupiedRows(rows.astype(np.int32), num_blocks, self._block_table[rows][is_used])

    def _free(self, rows: Int32Array) -> None:
        if not len(rows):
            return
        self.slots.free(rows)
        self._block_table[rows] = NULL_BLOCK
        self._num_blocks[rows] = 0

    def _assign(self, request: AssignedRequest) -> None:
        tokens = request.token_ids
        name = request.request_id
        if not 0 < request.num_prompt_tokens <= len(tokens) <= self.limits.max_model_len:
            raise PlanError(
                f"row_requests: {name!r} has {len(tokens)} tokens of which "
                f"{request.num_prompt_tokens} are its prompt; at least 1 and at most "
                f"max_model_len {self.limits.max_model_len} can be assigned to a row"
            )
        if tokens.min() < 0 or tokens.max() >= self.limits.vocab_size:
            raise PlanError(
                f"row_requests: {name!r} has token ids outside [0, {self.limits.vocab_size})"
            )
        self.slots.occupy(request)
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
        self.slots.check_range(rows, "appended_block_rows")
        if block_ids.min() <= NULL_BLOCK or block_ids.max() >= self.limits.num_kv_blocks:
            raise PlanError(
                f"appended_block_ids: blocks must be in [1, {self.limits.num_kv_blocks})"
            )
        if self.slots.are_distinct(rows):
            self.slots.check_occupied(rows, "appended_block_rows")
            columns = self._num_blocks[rows]
            distinct, num_blocks = rows, columns + 1
        else:
            # A row gets several blocks: rank them within their row, in order.
            order = np.argsort(rows, kind="stable")
            rows, block_ids = rows[order], block_ids[order]
            distinct, counts = np.unique(rows, return_counts=True)
            self.slots.check_occupied(distinct, "appended_block_rows")
            columns = self._num_blocks[rows] + ranks(counts)
            num_blocks = self._num_blocks[distinct] + counts.astype(np.int32)
        if num_blocks.max() > self._max_blocks:
            raise PlanError(
                f"appended_block_rows: a row would hold more than {self._max_blocks} blocks"
            )
        self._block_table[rows, columns] = block_ids
        self._num_blocks[distinct] = num_blocks

    def _check_rows(self, plan: ReceivedPlan, num_draft_tokens: Int32Array) -> None:
        """Checks the plan against what the rows hold."""
        rows = plan.rows
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        known = ends - num_draft_tokens
        num_tokens = self.num_tokens[rows]
        room = np.minimum(
            self._num_blocks[rows] * self.limits.block_size, self.limits.max_model_len
        )
        # In wrong plans the sum may overflow 32 bits.
        is_bad = (known > num_tokens) | (ends > room) | (plan.num_computed_tokens > room)
        if len(plan.draft_token_ids):
            is_bad |= (num_draft_tokens > 0) & (known != num_tokens)
        if is_bad.any():
            i = int(np.flatnonzero(is_bad)[0])
            row = int(rows[i])
            raise PlanError(
                what_is_wrong(
                    plan,
                    i,
                    f"row {row} ({self.slots.request_ids[row]!r})",
                    num_drafts=int(num_draft_tokens[i]),
                    num_tokens=int(num_tokens[i]),
                    num_blocks=int(self._num_blocks[row]),
                    max_model_len=self.limits.max_model_len,
                )
            )

    def _gather(self, plan: ReceivedPlan, num_draft_tokens: Int32Array) -> FlatBatch:
        seq_lens = plan.num_computed_tokens + plan.num_scheduled_tokens
        if not len(plan.draft_token_ids) and is_all_ones(plan.num_scheduled_tokens):
            num_tokens = self.num_tokens[plan.rows]
            if (seq_lens == num_tokens).all():
                return self._gather_decodes(plan, seq_lens)
        return self._gather_any(plan, num_draft_tokens)

    def _gather_decodes(self, plan: ReceivedPlan, seq_lens: Int32Array) -> FlatBatch:
        """The batch of a step in which every row has one token and samples the next."""
        rows, positions = plan.rows, plan.num_computed_tokens
        block_size, num_reqs = self.limits.block_size, len(rows)
        blocks, offsets = positions // block_size, positions % block_size
        slot_mapping = self._block_table[rows, blocks].astype(np.int64) * block_size + offsets
        max_blocks = int(self._num_blocks[rows].max()) if num_reqs else 0
        return FlatBatch(
            step_id=plan.step_id,
            rows=rows,
            query_start_loc=self._order[: num_reqs + 1],
            seq_lens=seq_lens,
            token_ids=self.token_ids[rows, positions],
            positions=positions.astype(np.int64),
            slot_mapping=slot_mapping,
            block_table=self._block_table[rows, :max_blocks],
            num_samples=plan.num_scheduled_tokens,
            logits_indices=self._order[:num_reqs].astype(np.int64),
            sample_rows=rows,
            sample_positions=(seq_lens - self.num_prompt_tokens[rows]).astype(np.int64),
            sample_num_tokens=seq_lens.astype(np.int64),
            num_draft_tokens=self._zeros[:num_reqs],
            draft_token_ids=EMPTY_INT32,
            prompt_indices=_EMPTY_INT64,
            prompt_rows=EMPTY_INT32,
            prompt_target_ids=_EMPTY_INT64,
        )

    def _gather_any(self, plan: ReceivedPlan, num_draft_tokens: Int32Array) -> FlatBatch:
        rows, scheduled, computed = plan.rows, plan.num_scheduled_tokens, plan.num_computed_tokens
        num_tokens = self.num_tokens[rows]
        self._write_drafts(rows, num_tokens, num_draft_tokens, plan.draft_token_ids)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        np.cumsum(scheduled, out=query_start_loc[1:])
        seq_lens = computed + scheduled
        row_of_token = repeated(rows, scheduled)
        positions = repeated(computed, scheduled).astype(np.int64) + ranks(scheduled)
        block_of_token = self._block_table[row_of_token, positions // self.limits.block_size]
        slot_mapping = (
            block_of_token.astype(np.int64) * self.limits.block_size
            + positions % self.limits.block_size
        )
        max_blocks = int(self._num_blocks[rows].max()) if len(rows) else 0

        num_samples = np.where(
            seq_lens - num_draft_tokens == num_tokens, num_draft_tokens + 1, 0
        ).astype(np.int32)
        sample_ranks = ranks(num_samples)
        sample_rows = repeated(rows, num_samples)
        sample_num_tokens = repeated(num_tokens, num_samples).astype(np.int64) + sample_ranks
        logits_indices = (
            repeated(query_start_loc[1:] - num_samples, num_samples).astype(np.int64) + sample_ranks
        )
        prompt_indices, prompt_rows, prompt_targets = self._prompt_targets(row_of_token, positions)
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
        """Writes drafts behind each row's tokens for the gather; they do not count as tokens."""
        if len(draft_token_ids):
            columns = np.repeat(num_tokens, num_draft_tokens) + ranks(num_draft_tokens)
            row_of_draft = np.repeat(rows, num_draft_tokens)
            self.token_ids[row_of_draft, columns] = np.maximum(draft_token_ids, 0)

    def _prompt_targets(
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
