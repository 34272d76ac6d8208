"""Audits of one engine's KV ledger on demand: the core's book, and the worker's rows against it.

The next plan asks the worker for its rows. The book is walked when that plan is made, and the block
tables are kept as they are then, because the book has moved on when the step's result brings the
rows. An engine with nothing to plan sends an empty plan for it, so the rows of an idle worker are
compared, too.
"""

import asyncio
from collections.abc import Container, Iterator
from dataclasses import dataclass

import numpy as np

from scheduler.core.audit import BookAudit, RowTables, limited
from scheduler.core.scheduler import SchedulerCore
from scheduler.worker import WorkerSpec


@dataclass(frozen=True, slots=True)
class LedgerAudit:
    """What an audit found at one worker.

    num_compared_rows is None where the worker gave no account of its rows. faults are sentences;
    none: the ledger is sound.
    """

    info: WorkerSpec
    book: BookAudit
    num_compared_rows: int | None
    faults: tuple[str, ...]


Answer = asyncio.Future[LedgerAudit | None]


@dataclass(frozen=True, slots=True)
class OpenAudit:
    """An audit whose plan was sent.

    Args:
        book: as it was when the plan was made.
        tables: the block tables, which the worker has once it has applied the plan.
        untold_rows: free rows that the worker has not been told of, and may still have.
        answers: who waits for it.
    """

    book: BookAudit
    tables: RowTables
    untold_rows: frozenset[int]
    answers: tuple[Answer, ...]


class Auditor:
    """The audits of one engine, which calls `begin` with each plan and `end` with its result."""

    def __init__(self, core: SchedulerCore, info: WorkerSpec, live_keys: Container[int]) -> None:
        """live_keys: the requests that the engine knows."""
        self._core = core
        self._info = info
        self._live_keys = live_keys
        self._asked: list[Answer] = []
        self._unanswered: set[Answer] = set()

    def ask(self) -> Answer:
        """Ask for an audit with the next plan; its answer is None when the engine has ended."""
        answer: Answer = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        return answer

    async def wait(self, answer: Answer, patience_s: float) -> LedgerAudit | None:
        """The answer; without the worker's rows if those do not come in time."""
        try:
            async with asyncio.timeout(patience_s):
                return await answer
        except TimeoutError:
            return LedgerAudit(self._info, book := self._walk(), None, book.faults)

    def begin(self) -> OpenAudit | None:
        """The audit that the plan which was just made is to carry, if one was asked for."""
        if not self._asked:
            return None
        asked = tuple(answer for answer in self._asked if not answer.done())
        self._asked.clear()
        if not asked:
            return None
        try:
            untold = frozenset(self._core.state.freed_rows)
            return OpenAudit(self._walk(), self._core.row_tables(), untold, asked)
        except Exception as error:  # noqa: BLE001 - whoever asked gets it; the step goes on
            for answer in asked:
                answer.set_exception(error)
            return None

    def end(self, audit: OpenAudit, rows: RowTables | None) -> None:
        """Answer with what the worker says its rows are after the plan; None: it does not say."""
        num_compared, faults = None, audit.book.faults
        if rows is not None:
            num_compared = len(set(rows.rows.tolist()) - audit.untold_rows)
            faults = limited([*faults, *row_faults(audit, rows)])
        for answer in audit.answers:
            if not answer.done():
                answer.set_result(LedgerAudit(self._info, audit.book, num_compared, faults))

    def close(self) -> None:
        """Answer those that wait: the engine has ended, and its ledger with it."""
        for answer in tuple(self._unanswered):
            if not answer.done():
                answer.set_result(None)

    def _walk(self) -> BookAudit:
        return self._core.audit(self._live_keys)


def row_faults(audit: OpenAudit, rows: RowTables) -> Iterator[str]:
    """What the worker's rows and the book say differently."""
    expected, found = dict(_tables(audit.tables)), dict(_tables(rows))
    for row in sorted(expected.keys() | found.keys()):
        if row not in found:
            yield f"the worker does not have row {row}, which runs a request"
        elif row not in expected:
            if row not in audit.untold_rows:
                yield f"the worker has row {row} with {len(found[row])} blocks, which is free"
        elif found[row] != expected[row]:
            yield _difference(row, expected[row], found[row])


def _tables(tables: RowTables) -> Iterator[tuple[int, list[int]]]:
    """Each row and its block table."""
    ends = np.cumsum(tables.num_blocks).tolist()
    for row, num_blocks, end in zip(
        tables.rows.tolist(), tables.num_blocks.tolist(), ends, strict=True
    ):
        yield row, tables.block_ids[end - num_blocks : end].tolist()


def _difference(row: int, expected: list[int], found: list[int]) -> str:
    """The first place at which two block tables of a row differ."""
    for place, (ours, theirs) in enumerate(zip(expected, found, strict=False)):
        if ours != theirs:
            return (
                f"the worker has block {theirs} at place {place} of row {row}, "
                f"the book has block {ours}"
            )
    return f"the worker has {len(found)} blocks in row {row}, the book has {len(expected)}"
