"""The step being planned: who advances by how many tokens, and what is left of the budget.

The running pass fills it either with columns (everybody at once) or request by request; the waiting
pass adds admissions. Whatever was added can be taken out again until the plan is made.
"""

from dataclasses import dataclass

import numpy as np

from scheduler.core.plan import EMPTY_INT32, Admission, Int32Array, PassedOver, RowRequest, Victim
from scheduler.core.request_table import IntpArray


@dataclass(slots=True)
class BatchColumns:
    """Scheduled rows in plan order; every column is [num_reqs]."""

    rows: IntpArray
    num_computed: Int32Array  # before this step
    num_scheduled: Int32Array  # drafts included
    goals: Int32Array  # known tokens and those in flight: below it a row is mid-prefill
    num_drafts: Int32Array | None  # None: nobody has any


NOBODY_SCHEDULED = BatchColumns(np.empty(0, np.intp), EMPTY_INT32, EMPTY_INT32, EMPTY_INT32, None)


class StepBatch:
    """Scheduled rows, blocks appended to them, and what happened on the way."""

    __slots__ = (
        "admissions",
        "budget",
        "grown_ids",
        "grown_rows",
        "has_drafts",
        "is_deferring_prefills",
        "now",
        "num_behind_head",
        "num_walked",
        "passed_over",
        "row_requests",
        "rows",
        "step_id",
        "vector",
        "victims",
    )

    def __init__(self, step_id: int, now: float, budget: int) -> None:
        self.step_id = step_id
        self.now = now
        self.budget = budget
        self.is_deferring_prefills = False
        self.has_drafts = False
        self.vector: BatchColumns | None = None
        # (row, num_computed, num_scheduled, goal, num_drafts) of those scheduled one by one.
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.num_walked = 0
        self.grown_rows: list[int] = []
        self.grown_ids: list[int] = []
        self.row_requests: list[RowRequest] = []
        self.admissions: list[Admission] = []
        self.victims: list[Victim] = []
        self.passed_over: list[PassedOver] = []
        self.num_behind_head = 0

    def end_running_pass(self) -> None:
        """From here on, whoever is added was waiting."""
        self.num_walked = len(self.rows)

    @property
    def running_rows(self) -> IntpArray:
        """[..] rows that the running pass scheduled."""
        if self.vector is not None:
            return self.vector.rows
        return np.array([entry[0] for entry in self.rows[: self.num_walked]], dtype=np.intp)

    def set_columns(self, columns: BatchColumns, num_tokens: int) -> None:
        """Schedule running rows all at once, num_tokens in sum."""
        self.vector = columns
        self.budget -= num_tokens
        self.has_drafts |= columns.num_drafts is not None

    def add(
        self, row: int, num_computed: int, num_scheduled: int, goal: int, num_drafts: int
    ) -> None:
        """Schedule one row."""
        self.rows.append((row, num_computed, num_scheduled, goal, num_drafts))
        self.budget -= num_scheduled
        self.has_drafts |= num_drafts > 0

    def grow(self, row: int, block_ids: list[int]) -> None:
        """Note blocks appended to a row's table."""
        self.grown_rows += [row] * len(block_ids)
        self.grown_ids += block_ids

    def grow_rows(self, rows: IntpArray, block_ids: list[int]) -> None:
        """Note blocks appended to several rows, one row for each block."""
        self.grown_rows += rows.tolist()
        self.grown_ids += block_ids

    def has(self, row: int) -> bool:
        """Whether a row is scheduled so far."""
        self._flatten()
        return any(entry[0] == row for entry in self.rows)

    def refund(self, row: int) -> bool:
        """Take a row out: its tokens return to the budget. False when it was not scheduled."""
        self._flatten()
        index = next((i for i, entry in enumerate(self.rows) if entry[0] == row), None)
        if index is None:
            return False
        self.budget += self.rows.pop(index)[2]
        self.num_walked -= index < self.num_walked
        kept = [
            pair for pair in zip(self.grown_rows, self.grown_ids, strict=True) if pair[0] != row
        ]
        self.grown_rows = [pair[0] for pair in kept]
        self.grown_ids = [pair[1] for pair in kept]
        return True

    def columns(self) -> BatchColumns:
        """Everybody scheduled, as columns."""
        if not self.rows:
            return self.vector or NOBODY_SCHEDULED
        table = np.array(self.rows, dtype=np.int32).T
        num_drafts = table[4] if self.has_drafts else None
        walked = BatchColumns(table[0].astype(np.intp), table[1], table[2], table[3], num_drafts)
        return walked if self.vector is None else _joined(self.vector, walked)

    def _flatten(self) -> None:
        vector = self.vector
        if vector is None:
            return
        drafts = [0] * len(vector.rows) if vector.num_drafts is None else vector.num_drafts.tolist()
        columns = (vector.rows, vector.num_computed, vector.num_scheduled, vector.goals)
        entries = zip(*(column.tolist() for column in columns), drafts, strict=True)
        self.rows[:0] = entries
        self.num_walked += len(vector.rows)
        self.vector = None


def _joined(first: BatchColumns, second: BatchColumns) -> BatchColumns:
    num_drafts = None
    if second.num_drafts is not None:
        no_drafts = np.zeros(len(first.rows), np.int32)
        num_drafts = np.concatenate(
            (no_drafts if first.num_drafts is None else first.num_drafts, second.num_drafts)
        )
    return BatchColumns(
        np.concatenate((first.rows, second.rows)),
        np.concatenate((first.num_computed, second.num_computed)),
        np.concatenate((first.num_scheduled, second.num_scheduled)),
        np.concatenate((first.goals, second.goals)),
        num_drafts,
    )
