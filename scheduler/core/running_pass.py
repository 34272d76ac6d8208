"""Gives running requests their tokens, in the order of their admission.

Everybody advances to the end of its known tokens, within the budget. When blocks run out, a victim
loses its own until the request at hand fits or falls itself. The columns path serves all rows with
a few vector operations when free blocks cover everybody; else the rows are walked one by one. Both
give the same plan (tests/properties).
"""

import numpy as np

from scheduler.core.batch import BatchColumns, StepBatch
from scheduler.core.plan import Int32Array
from scheduler.core.request_table import BoolArray
from scheduler.core.state import SchedulerState

# Up to here walking is cheaper than vector operations.
MAX_WALKED_ROWS = 2


class RunningPass:
    """The first half of a step."""

    def __init__(self, state: SchedulerState, *, max_walked_rows: int | None = None) -> None:
        self._state = state
        self._table = state.table
        self._kv = state.kv
        config = state.config
        self._threshold = config.long_prefill_token_threshold
        self._max_computed = config.max_model_len - 1
        self._has_drafts = config.num_spec_tokens > 0
        self._is_priority = config.policy == "priority"
        self._max_walked_rows = MAX_WALKED_ROWS if max_walked_rows is None else max_walked_rows

    def run(self, batch: StepBatch) -> None:
        """Schedule running requests into the batch."""
        if self._table.num_running > self._max_walked_rows and self._schedule_columns(batch):
            return
        self._walk(batch)

    def _schedule_columns(self, batch: StepBatch) -> bool:
        """All rows at once; False, and nothing done, when free blocks do not cover everybody."""
        table = self._table
        rows = table.running_rows.copy()
        num_computed = table.num_computed[rows]
        goals = table.num_tokens[rows]
        if self._state.is_pipelined:
            goals = goals + table.num_placeholders[rows]
        wanted = self._wanted(batch, goals, num_computed)
        is_served = wanted > 0
        if np.count_nonzero(is_served) < len(rows):
            rows, num_computed = rows[is_served], num_computed[is_served]
            goals, wanted = goals[is_served], wanted[is_served]
        num_tokens = int(np.add.reduce(wanted))
        if num_tokens > batch.budget:
            num_tokens = batch.budget
            end = _clip(wanted, num_tokens)
            rows, num_computed = rows[:end], num_computed[:end]
            goals, wanted = goals[:end], wanted[:end]
        after = num_computed + wanted
        due = (after >= table.next_block_event[rows]).nonzero()[0]
        if len(due):
            grown = self._kv.grow_rows(rows[due], after[due])
            if grown is None:
                return False
            batch.grow_rows(*grown)
        num_drafts = None
        if self._has_drafts:
            num_drafts = np.clip(after - goals, 0, table.num_drafts[rows])
            num_drafts = num_drafts if num_drafts.any() else None
        if len(rows):
            batch.set_columns(
                BatchColumns(rows, num_computed, wanted, goals, num_drafts), num_tokens
            )
        return True

    def _wanted(self, batch: StepBatch, goals: Int32Array, num_computed: Int32Array) -> Int32Array:
        """[num_running] tokens that each running row may advance, budget aside; 0: passed over."""
        table = self._table
        wanted = goals - num_computed
        if self._has_drafts:
            wanted += table.num_drafts[table.running_rows]
        if self._threshold:
            np.minimum(wanted, self._threshold, out=wanted)
        if self._has_drafts or self._state.is_pipelined:
            np.minimum(wanted, self._max_computed - num_computed, out=wanted)
        if self._state.is_pipelined:
            wanted[self._is_output_complete(num_computed)] = 0
        if batch.is_deferring_prefills:
            wanted[table.is_prefill_chunk[table.running_rows]] = 0
        return wanted

    def _is_output_complete(self, num_computed: Int32Array) -> BoolArray:
        """[num_running] whether the tokens in flight already reach max_tokens."""
        table = self._table
        rows = table.running_rows
        num_placeholders = table.num_placeholders[rows]
        will_have = num_computed + 2 - num_placeholders
        return (num_placeholders > 0) & (will_have >= table.output_limit[rows])

    def _walk(self, batch: StepBatch) -> None:
        """Row by row, preempting when blocks run out."""
        table = self._table
        position = 0
        while batch.budget > 0 and position < table.num_running:
            row = int(table.running_rows[position])
            num_new = self._wanted_by(batch, row)
            if num_new <= 0:
                position += 1
                continue
            after = table.num_computed.item(row) + num_new
            num_missing = self._kv.blocks_to_grow(row, after)
            while num_missing > self._kv.pool.num_free:
                victim_position = self._victim_position()
                victim_row = int(table.running_rows[victim_position])
                was_scheduled = self._state.displace(
                    batch, victim_position, table.request(row), num_missing
                )
                if victim_row == row:
                    # The reference gives those behind it nothing in this step.
                    return
                # As the reference: a victim that was merely passed over before shifts the
                # others without correcting the position.
                position -= was_scheduled
            self._serve(batch, row, num_new, num_missing)
            position += 1

    def _wanted_by(self, batch: StepBatch, row: int) -> int:
        """Tokens that a row may advance; at most 0: it is passed over."""
        table = self._table
        num_computed = table.num_computed.item(row)
        num_placeholders = table.num_placeholders.item(row)
        if num_placeholders > 0 and (
            num_computed + 2 - num_placeholders >= table.output_limit.item(row)
        ):
            return 0
        if batch.is_deferring_prefills and table.is_prefill_chunk[row]:
            return 0
        num_known = table.num_tokens.item(row) + table.num_drafts.item(row) + num_placeholders
        num_new = num_known - num_computed
        if 0 < self._threshold < num_new:
            num_new = self._threshold
        return min(num_new, batch.budget, self._max_computed - num_computed)

    def _serve(self, batch: StepBatch, row: int, num_new: int, num_missing: int) -> None:
        table = self._table
        num_computed = table.num_computed.item(row)
        after = num_computed + num_new
        if num_missing:
            batch.grow(row, self._kv.grow(row, num_missing))
        if after >= table.next_block_event.item(row):
            self._kv.register(row, after)
        goal = table.num_tokens.item(row) + table.num_placeholders.item(row)
        num_drafts = min(max(after - goal, 0), table.num_drafts.item(row))
        batch.add(row, num_computed, num_new, goal, num_drafts)

    def _victim_position(self) -> int:
        """Who loses its blocks: the youngest, or the least urgent under policy priority."""
        if self._is_priority:
            return self._state.least_urgent_position()
        # It has the least to recompute, and rejoins at the head of waiting.
        return self._table.num_running - 1


def _clip(wanted: Int32Array, budget: int) -> int:
    """Cut wanted where the budget ends, in place; returns how many rows get anything."""
    total = np.cumsum(wanted)
    last = int(np.searchsorted(total, budget))
    wanted[last] -= total[last] - budget
    return last + 1
