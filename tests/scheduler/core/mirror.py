"""The rows of a worker that is sent every plan, to compare with the core's book."""

import numpy as np

from scheduler.core.plan import StepPlan
from scheduler.core.scheduler import SchedulerCore


class WorkerRows:
    """The block table of each occupied row; a plan that contradicts them fails the test."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}

    def apply(self, plan: StepPlan) -> None:
        """Free, place and append as the worker does; a plan with nothing to do is not sent."""
        if not plan.is_worth_sending:
            assert not plan.row_requests
            assert not len(plan.appended_block_rows)
            return
        for row in plan.freed_rows.tolist():
            assert row in self.tables, f"row {row} is freed and was empty"
            del self.tables[row]
        for request in plan.row_requests:
            assert request.row not in self.tables, f"row {request.row} is taken"
            self.tables[request.row] = []
        pairs = zip(
            plan.appended_block_rows.tolist(), plan.appended_block_ids.tolist(), strict=True
        )
        for row, block_id in pairs:
            self.tables[row].append(block_id)
        assert set(plan.rows.tolist()) <= self.tables.keys(), "an empty row advances"

    def check(self, core: SchedulerCore) -> None:
        """The book has the same rows, but for free ones that the worker was not told of yet."""
        book = core.row_tables()
        ends = np.cumsum(book.num_blocks)[:-1]
        tables = [table.tolist() for table in np.split(book.block_ids, ends)]
        untold = set(core.state.freed_rows)
        told = {row: table for row, table in self.tables.items() if row not in untold}
        assert told == dict(zip(book.rows.tolist(), tables, strict=False))
