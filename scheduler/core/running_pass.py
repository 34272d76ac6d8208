"""Gives running requests their tokens, in the order of their admission.

Everybody advances to the end of its known tokens, within the budget. When blocks run out, a victim
loses its own until the request at hand fits or falls itself. Rows are served with a few vector
operations as far as free blocks cover them; a row that they do not cover is served by itself, and
so are few rows. It makes no difference for the plan (tests/properties).
"""

import numpy as np

from scheduler.core.batch import BatchColumns, StepBatch
from scheduler.core.plan import BoolArray, Int32Array
from scheduler.core.request_table import IntpArray
from scheduler.core.state import SchedulerState


class RunningPass:
    """The first half of a step."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._table = state.table
        self._kv = state.kv
        config = state.config
        self._threshold = config.long_prefill_token_threshold
        self._max_computed = config.max_model_len - 1
        self._has_drafts = config.num_spec_tokens > 0
        self._is_priority = config.policy == "priority"
        self._max_walked_rows = state.max_walked_rows

    def run(self, batch: StepBatch) -> None:
        """Schedule running requests into the batch."""
        table = self._table
        position = 0
        while batch.budget > 0 and position < table.num_running:
            if table.num_running - position > self._max_walked_rows:
                position = self._serve_columns(batch, position)
            if batch.budget > 0 and position < table.num_running:
                position = self._serve_row(batch, position)
        if table.num_long and batch.long_budget <= 0 < batch.budget:
            self._note_held(batch)

    def _serve_columns(self, batch: StepBatch, start: int) -> int:
        """Serve rows from a position on at once, up to the first that free blocks do not cover.

        Returns:
            The position of that row, or the end.
        """
        table = self._table
        rows = table.running_rows[start:].copy()
        num_computed = table.num_computed[rows]
        goals = table.num_tokens[rows]
        if self._state.is_pipelined:
            goals = goals + table.num_placeholders[rows]
        wanted = self._wanted(batch, rows, goals, num_computed)
        places = (wanted > 0).nonzero()[0]
        if len(places) < len(rows):
            rows, num_computed = rows[places], num_computed[places]
            goals, wanted = goals[places], wanted[places]
        num_served = len(rows)
        if int(np.add.reduce(wanted)) > batch.budget:
            num_served = _clip(wanted, batch.budget)
        after = num_computed + wanted
        due = (after[:num_served] >= table.next_block_event[rows[:num_served]]).nonzero()[0]
        end = table.num_running
        if len(due):
            grown_rows, block_ids, num_covered = self._kv.grow_rows(rows[due], after[due])
            batch.grow_rows(grown_rows, block_ids)
            if num_covered < len(due):
                num_served = int(due[num_covered])
                end = start + int(places[num_served])
        if num_served:
            served = slice(num_served)
            columns = BatchColumns(
                rows[served], num_computed[served], wanted[served], goals[served], None
            )
            columns.num_drafts = self._scheduled_drafts(columns.rows, (after - goals)[served])
            batch.add_columns(columns)
            if table.num_long:
                is_long = self._is_long_prefill(columns.rows)
                batch.long_budget -= int(columns.num_scheduled[is_long].sum())
        return end

    def _is_long_prefill(self, rows: IntpArray) -> BoolArray:
        """[num_rows] whether each is within a long prefill."""
        return self._table.is_long[rows] & self._table.is_prefill_chunk[rows]

    def _note_held(self, batch: StepBatch) -> None:
        """Count the step for requests whose long prefill got nothing in it."""
        rows = self._table.running_rows
        scheduled = batch.columns().rows
        for row in np.setdiff1d(rows[self._is_long_prefill(rows)], scheduled).tolist():
            self._table.request(row).history.num_held_steps += 1

    def _scheduled_drafts(self, rows: IntpArray, num_beyond: Int32Array) -> Int32Array | None:
        """[num_rows] drafts among the tokens beyond the known ones; None: nobody has any."""
        if not self._has_drafts:
            return None
        num_drafts = np.clip(num_beyond, 0, self._table.num_drafts[rows])
        return num_drafts if num_drafts.any() else None

    def _wanted(
        self, batch: StepBatch, rows: IntpArray, goals: Int32Array, num_computed: Int32Array
    ) -> Int32Array:
        """[num_rows] tokens that each row may advance, budget aside; at most 0: passed over."""
        table = self._table
        wanted = goals - num_computed
        if self._has_drafts:
            wanted += table.num_drafts[rows]
        if self._threshold:
            np.minimum(wanted, self._threshold, out=wanted)
        if self._has_drafts or self._state.is_pipelined:
            np.minimum(wanted, self._max_computed - num_computed, out=wanted)
        if self._state.is_pipelined:
            # The tokens in flight already reach max_tokens.
            num_placeholders = table.num_placeholders[rows]
            will_have = num_computed + 2 - num_placeholders
            wanted[(num_placeholders > 0) & (will_have >= table.output_limit[rows])] = 0
        if batch.is_deferring_prefills:
            wanted[table.is_prefill_chunk[rows]] = 0
        if table.num_long:
            places = self._is_long_prefill(rows).nonzero()[0]
            long = wanted[places]
            before = np.cumsum(long) - long
            wanted[places] = np.clip(batch.long_budget - before, 0, long)
        return wanted

    def _serve_row(self, batch: StepBatch, position: int) -> int:
        """Serve the row at a position, preempting others while blocks do not suffice.

        Returns:
            The position to go on from; the end, when the row itself fell.
        """
        table = self._table
        row = int(table.running_rows[position])
        num_new = self._wanted_by(batch, row)
        if num_new <= 0:
            return position + 1
        num_missing = self._kv.blocks_to_grow(row, table.num_computed.item(row) + num_new)
        while num_missing > self._kv.pool.num_free:
            victim_position = self._victim_position()
            victim_row = int(table.running_rows[victim_position])
            was_scheduled = self._state.displace(
                batch, victim_position, table.request(row), num_missing
            )
            if victim_row == row:
                # As the reference: those behind it get nothing in this step.
                return table.num_running
            # As the reference: a victim that was merely passed over before shifts the others
            # without correcting the position.
            position -= was_scheduled
        self._give(batch, row, num_new, num_missing)
        return position + 1

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
        if table.is_long[row] and table.is_prefill_chunk[row]:
            num_new = min(num_new, batch.long_budget)
        return min(num_new, batch.budget, self._max_computed - num_computed)

    def _give(self, batch: StepBatch, row: int, num_new: int, num_missing: int) -> None:
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
        if table.is_long[row] and table.is_prefill_chunk[row]:
            batch.long_budget -= num_new

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
