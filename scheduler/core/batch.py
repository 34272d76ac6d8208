"""The step being planned: its scheduled rows and the rest of the token budget.

The running pass adds many rows at once, the waiting pass one row for each admission. Until the plan
is made, a row can be removed again.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scheduler.core.plan import (
    EMPTY_INT32,
    NO_FACTS,
    Admission,
    Int32Array,
    PassedOver,
    RowRequest,
    StepFacts,
    Victim,
)
from scheduler.core.request_table import IntpArray


@dataclass(slots=True)
class BatchColumns:
    """Scheduled rows in plan order; every column is [num_reqs]."""

    rows: IntpArray
    num_computed: Int32Array  # before this step
    num_scheduled: Int32Array  # drafts included
    goals: Int32Array  # known tokens and tokens in flight; with less computed, a row is in prefill
    num_drafts: Int32Array | None = None  # None: no row has any

    def take(self, index: slice | NDArray[Any]) -> "BatchColumns":
        """Some of the rows."""
        return BatchColumns(
            self.rows[index],
            self.num_computed[index],
            self.num_scheduled[index],
            self.goals[index],
            None if self.num_drafts is None else self.num_drafts[index],
        )


NO_COLUMNS = BatchColumns(np.empty(0, np.intp), EMPTY_INT32, EMPTY_INT32, EMPTY_INT32)


class StepBatch:
    """Scheduled rows, the blocks appended to them, and the facts of the step."""

    __slots__ = (
        "_num_from_running",
        "_parts",
        "_tail",
        "admissions",
        "budget",
        "grown_ids",
        "grown_rows",
        "has_drafts",
        "is_deferring_prefills",
        "long_budget",
        "now",
        "num_behind_head",
        "passed_over",
        "row_requests",
        "step_id",
        "victims",
    )

    def __init__(self, step_id: int, now: float, budget: int) -> None:
        self.step_id = step_id
        self.now = now
        self.budget = budget
        self.long_budget = budget  # the part that long prefills may use
        self.is_deferring_prefills = False
        self.has_drafts = False
        # In plan order: rows that were added together, then rows that were added singly since then,
        # as (row, num_computed, num_scheduled, goal, num_drafts).
        self._parts: list[BatchColumns] = []
        self._tail: list[tuple[int, int, int, int, int]] = []
        self._num_from_running = 0
        self.grown_rows: list[int] = []
        self.grown_ids: list[int] = []
        self.row_requests: list[RowRequest] = []
        self.admissions: list[Admission] = []
        self.victims: list[Victim] = []
        self.passed_over: list[PassedOver] = []
        self.num_behind_head = 0

    def end_running_pass(self) -> None:
        """Rows added from here on are admissions."""
        self._num_from_running = sum(len(part.rows) for part in self._parts) + len(self._tail)

    @property
    def running_rows(self) -> IntpArray:
        """[..] rows that the running pass scheduled."""
        return self.columns().rows[: self._num_from_running]

    def add_columns(self, columns: BatchColumns, num_tokens: int) -> None:
        """Schedule several rows, with num_tokens tokens in all."""
        self._close_tail()
        self._parts.append(columns)
        self.budget -= num_tokens
        self.has_drafts |= columns.num_drafts is not None

    def add(
        self, row: int, num_computed: int, num_scheduled: int, goal: int, num_drafts: int
    ) -> None:
        """Schedule one row."""
        self._tail.append((row, num_computed, num_scheduled, goal, num_drafts))
        self.budget -= num_scheduled
        self.has_drafts |= num_drafts > 0

    def grow(self, rows: list[int], block_ids: list[int]) -> None:
        """Note appended blocks, and the row of each."""
        self.grown_rows += rows
        self.grown_ids += block_ids

    def has(self, row: int) -> bool:
        """Whether a row is scheduled so far."""
        return bool((self.columns().rows == row).any())

    def refund(self, row: int) -> bool:
        """Take a row out: its tokens return to the budget. False when it was not scheduled."""
        columns = self.columns()
        is_kept = columns.rows != row
        if is_kept.all():
            return False
        index = int(is_kept.argmin())
        self.budget += int(columns.num_scheduled[index])
        self._num_from_running -= index < self._num_from_running
        self._parts = [columns.take(is_kept)]
        self._tail = []
        kept = [
            pair for pair in zip(self.grown_rows, self.grown_ids, strict=True) if pair[0] != row
        ]
        self.grown_rows = [pair[0] for pair in kept]
        self.grown_ids = [pair[1] for pair in kept]
        return True

    def columns(self) -> BatchColumns:
        """All scheduled rows, as columns."""
        self._close_tail()
        if len(self._parts) > 1:
            self._parts = [_joined(self._parts)]
        return self._parts[0] if self._parts else NO_COLUMNS

    def _close_tail(self) -> None:
        if not self._tail:
            return
        table = np.array(self._tail, dtype=np.int32).T
        num_drafts = table[4] if self.has_drafts else None
        self._parts.append(
            BatchColumns(table[0].astype(np.intp), table[1], table[2], table[3], num_drafts)
        )
        self._tail = []

    def facts(self) -> StepFacts:
        """Why the step looks as it does."""
        if not self.victims and not self.passed_over and not self.num_behind_head:
            return NO_FACTS
        return StepFacts(tuple(self.passed_over), tuple(self.victims), self.num_behind_head)


def _joined(parts: list[BatchColumns]) -> BatchColumns:
    num_drafts = None
    if any(part.num_drafts is not None for part in parts):
        num_drafts = np.concatenate(
            [
                np.zeros(len(part.rows), np.int32) if part.num_drafts is None else part.num_drafts
                for part in parts
            ]
        )
    return BatchColumns(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([part.num_computed for part in parts]),
        np.concatenate([part.num_scheduled for part in parts]),
        np.concatenate([part.goals for part in parts]),
        num_drafts,
    )
