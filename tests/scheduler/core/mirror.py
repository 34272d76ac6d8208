"""The rows and KV blocks of a worker that runs every plan, to compare with the core's book."""

import numpy as np

from scheduler.core.plan import Lease, SchedulerConfig, StepPlan
from scheduler.core.scheduler import SchedulerCore


class MirroredWorker:
    """Block tables of occupied rows, and which slots of the blocks were written to.

    A plan that contradicts the rows, or reads KV that nothing wrote, fails the test.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.tables: dict[int, list[int]] = {}
        self.leases: dict[int, Lease] = {}
        self._block_size = config.block_size
        self._is_written = np.zeros((config.num_gpu_blocks, config.block_size), dtype=np.bool_)

    def receive(self, lease: Lease) -> None:
        """The transfer of an import is complete; it must be one that the plans have told of."""
        assert lease.lease_id in self.leases, "the lease has ended, or was never begun"
        self._is_written[list(lease.missing_block_ids)] = True

    def apply(self, plan: StepPlan) -> None:
        """Free, place and append as the worker does, then run; an empty plan is not sent."""
        if not plan.is_worth_sending:
            assert not plan.row_requests
            assert not len(plan.appended_block_rows)
            return
        for lease_id in plan.ended_leases:
            self.leases.pop(lease_id, None)
        for lease in plan.begun_leases:
            self.leases[lease.lease_id] = lease
            self._is_written[list(lease.missing_block_ids)] = False
        for row in plan.freed_rows.tolist():
            assert row in self.tables, f"row {row} is freed and was empty"
            del self.tables[row]
        for request in plan.row_requests:
            assert request.row not in self.tables, f"row {request.row} is taken"
            self.tables[request.row] = []
        steps = {
            row: (start, start + count)
            for row, start, count in zip(
                plan.rows.tolist(),
                plan.num_computed_tokens.tolist(),
                plan.num_scheduled_tokens.tolist(),
                strict=True,
            )
        }
        pairs = zip(
            plan.appended_block_rows.tolist(), plan.appended_block_ids.tolist(), strict=True
        )
        for row, block_id in pairs:
            self.tables[row].append(block_id)
            if len(self.tables[row]) * self._block_size > steps[row][0]:  # no prefix hit
                self._is_written[block_id] = False
        assert steps.keys() <= self.tables.keys(), "an empty row advances"
        leased = {
            block
            for lease in self.leases.values()
            for block in (lease.missing_block_ids if lease.is_import else lease.block_ids)
        }
        written = {
            self.tables[row][p // self._block_size]
            for row, (start, end) in steps.items()
            for p in range(start, end)
        }
        assert not written & leased, "a step writes to a block that is being transferred"
        # A step writes the KV of all its tokens before it reads any.
        for row, (start, end) in steps.items():
            self._is_written[self._slots(row, start, end)] = True
        for row, (_, end) in steps.items():
            is_written = self._is_written[self._slots(row, 0, end)]
            assert is_written.all(), f"row {row} reads KV that was never written"

    def _slots(self, row: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Where the KV of a row's positions is: block and offset of each."""
        positions = np.arange(start, end)
        table = np.array(self.tables[row], dtype=np.intp)
        return table[positions // self._block_size], positions % self._block_size

    def check(self, core: SchedulerCore) -> None:
        """The book has the same rows, but for free ones that the worker was not told of yet."""
        book = core.row_tables()
        ends = np.cumsum(book.num_blocks)[:-1]
        tables = [table.tolist() for table in np.split(book.block_ids, ends)]
        untold = set(core.state.freed_rows)
        told = {row: table for row, table in self.tables.items() if row not in untold}
        assert told == dict(zip(book.rows.tolist(), tables, strict=False))
