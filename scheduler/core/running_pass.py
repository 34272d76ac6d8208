"""Gives running requests their tokens, in the order of their admission.

Every request advances to the end of its known tokens, within the budget. A few vector operations
serve all rows up to the first row for which free blocks do not suffice. For that row, victims are
preempted until the row fits or is the victim itself.
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

    def run(self, batch: StepBatch) -> None:
        """Schedule running requests into the batch."""
        table = self._table
        position = 0
        while batch.budget > 0 and position < table.num_running:
            position, uncovered = self._serve(batch, position)
            if uncovered is not None:
                position = self._make_room(batch, position, uncovered)
        if table.num_long and batch.long_budget <= 0 < batch.budget:
            self._note_held(batch)

    def _serve(self, batch: StepBatch, start: int) -> tuple[int, BatchColumns | None]:
        """Serve rows from a position on, up to the first row for which free blocks do not suffice.

        Returns:
            The position of that row and the row's columns; or the end and None.
        """
        table = self._table
        rows = table.running_rows[start:].copy()
        num_computed = table.num_computed[rows]
        goals = table.num_tokens[rows]
        if self._state.is_pipelined:
            goals = goals + table.num_placeholders[rows]
        wanted = self._wanted(batch, rows, goals, num_computed)
        indexes = (wanted > 0).nonzero()[0]
        columns = BatchColumns(rows, num_computed, wanted, goals)
        if len(indexes) < len(rows):
            columns = columns.take(indexes)
        num_tokens = int(np.add.reduce(columns.num_scheduled))
        if num_tokens > batch.budget:
            num_cut = _cut(columns.num_scheduled, num_tokens - batch.budget)
            num_tokens = batch.budget
            columns = columns.take(slice(num_cut)) if num_cut < len(columns.rows) else columns
        num_served = self._give(batch, columns, num_tokens)
        if num_served == len(columns.rows):
            return table.num_running, None
        return start + int(indexes[num_served]), columns.take(slice(num_served, num_served + 1))

    def _give(self, batch: StepBatch, columns: BatchColumns, num_tokens: int) -> int:
        """Schedule rows up to the first for which free blocks do not suffice; returns their number.

        num_tokens is the sum over all of columns.num_scheduled.
        """
        num_served = len(columns.rows)
        after = columns.num_computed + columns.num_scheduled
        due = (after >= self._table.growth_event[columns.rows]).nonzero()[0]
        if len(due):
            grown_rows, block_ids, num_covered = self._kv.grow(columns.rows[due], after[due])
            batch.grow(grown_rows.tolist(), block_ids)
            if num_covered < len(due):
                num_served = int(due[num_covered])
                columns, after = columns.take(slice(num_served)), after[:num_served]
                num_tokens = int(np.add.reduce(columns.num_scheduled))
        if num_served:
            num_known = after
            if self._has_drafts or self._state.is_pipelined:
                num_known = np.minimum(after, self._table.num_tokens[columns.rows])
            self._kv.register(columns.rows, num_known)
            columns.num_drafts = self._scheduled_drafts(columns.rows, after - columns.goals)
            batch.add_columns(columns, num_tokens)
            if self._table.num_long:
                is_long = self._is_long_prefill(columns.rows)
                batch.long_budget -= int(columns.num_scheduled[is_long].sum())
        return num_served

    def _make_room(self, batch: StepBatch, position: int, columns: BatchColumns) -> int:
        """Preempt victims until free blocks suffice for the row in `columns`, and schedule the row.

        Returns:
            The position to go on from; the end, when the row itself was preempted.
        """
        table = self._table
        row = int(columns.rows[0])
        after = columns.num_computed + columns.num_scheduled
        num_missing = int(self._kv.num_missing(columns.rows, after)[0])
        while num_missing > self._kv.pool.num_free:
            victim_position = self._state.policy.victim_position(table)
            victim_row = int(table.running_rows[victim_position])
            was_scheduled = self._state.displace(
                batch, victim_position, table.request(row), num_missing
            )
            if victim_row == row:
                # Quirk of vLLM 0.27.1: the rows behind this row get nothing in this step.
                return table.num_running
            # Quirk of vLLM 0.27.1: if the victim stood before this row and got no tokens in this
            # pass, `position` is not decremented, so the next running request is skipped.
            position -= was_scheduled
        self._give(batch, columns, int(columns.num_scheduled[0]))
        return position + 1

    def _is_long_prefill(self, rows: IntpArray) -> BoolArray:
        """[num_rows] whether each is within a long prefill."""
        return self._table.is_long[rows] & self._table.is_prefill_chunk[rows]

    def _long_prefills(self, rows: IntpArray) -> IntpArray:
        """[num_long] indexes of rows within a long prefill, in the order of service.

        The order is the policy's where ranks of running requests can be compared, otherwise the
        running order.
        """
        indexes, policy, table = (
            self._is_long_prefill(rows).nonzero()[0],
            self._state.policy,
            self._table,
        )
        if not policy.merges_queues or len(indexes) < 2:
            return indexes
        ranks = [policy.rank(table.request(row), 0) for row in rows[indexes].tolist()]
        return indexes[sorted(range(len(indexes)), key=ranks.__getitem__)]

    def _note_held(self, batch: StepBatch) -> None:
        """Count the step for requests whose long prefill got nothing in it."""
        rows = self._table.running_rows
        scheduled = batch.columns().rows
        for row in np.setdiff1d(rows[self._is_long_prefill(rows)], scheduled).tolist():
            self._table.request(row).history.num_held_steps += 1

    def _scheduled_drafts(self, rows: IntpArray, num_beyond: Int32Array) -> Int32Array | None:
        """[num_rows] drafts among the tokens beyond the known ones; None: no row has any."""
        if not self._has_drafts:
            return None
        num_drafts = np.clip(num_beyond, 0, self._table.num_drafts[rows])
        return num_drafts if num_drafts.any() else None

    def _wanted(
        self, batch: StepBatch, rows: IntpArray, goals: Int32Array, num_computed: Int32Array
    ) -> Int32Array:
        """[num_rows] tokens that each row may advance, whatever the budget; 0 or less: none."""
        table = self._table
        wanted = goals - num_computed
        if self._has_drafts:
            wanted += table.num_drafts[rows]
        if self._threshold:
            np.minimum(wanted, self._threshold, out=wanted)
        if self._has_drafts or self._state.is_pipelined:
            np.minimum(wanted, self._max_computed - num_computed, out=wanted)
        if self._state.is_pipelined:
            # Tokens in flight already bring the request to its end.
            num_placeholders = table.num_placeholders[rows]
            will_have = num_computed + 2 - num_placeholders
            wanted[(num_placeholders > 0) & (will_have >= table.output_limit[rows])] = 0
        if batch.is_deferring_prefills:
            wanted[table.is_prefill_chunk[rows]] = 0
        if table.num_long:
            indexes = self._long_prefills(rows)
            long = wanted[indexes]
            before = np.cumsum(long) - long
            wanted[indexes] = np.clip(batch.long_budget - before, 0, long)
        return wanted


def _cut(wanted: Int32Array, num_tokens: int) -> int:
    """Take num_tokens from the last rows, in place; returns how many rows keep any."""
    last = len(wanted) - 1
    if wanted.item(last) <= num_tokens:
        # The last rows get nothing: all whose sum from the end is not above num_tokens.
        sums = np.cumsum(wanted[::-1])
        num_without = int(np.searchsorted(sums, num_tokens, side="right"))
        last -= num_without
        num_tokens -= sums.item(num_without - 1)
    wanted[last] -= num_tokens
    return last + 1
