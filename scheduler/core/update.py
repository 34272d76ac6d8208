"""Takes a step's sampled tokens: appends them, takes back rejected drafts, ends who is done.

The columns path appends everybody's tokens and tests for stops with a few vector operations, and
looks only at those that may have ended; else tokens are taken request by request. Both do the same
(tests/properties).
"""

from dataclasses import dataclass

import numpy as np

from scheduler.core.plan import (
    EMPTY_INT32,
    BoolArray,
    FinishedRequest,
    Int32Array,
    RequestStatus,
    StepOutput,
    StepResult,
)
from scheduler.core.request import Request
from scheduler.core.request_table import NOBODY, IntpArray
from scheduler.core.state import Flight, SchedulerState
from scheduler.core.stop import End, stop_status


@dataclass(slots=True)
class _Sampled:
    """Rows that got tokens, in plan order, and their tokens one row after the other."""

    rows: IntpArray  # [num_rows]
    counts: Int32Array  # [num_rows], each at least 1
    token_ids: Int32Array  # [sum(counts)]
    num_drafts: Int32Array | None  # [num_rows]


class OutputUpdate:
    """The second half of a round: what came back changes the running set."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._table = state.table
        self._max_num_tokens = state.config.max_num_tokens
        self._max_walked_rows = state.max_walked_rows

    def run(self, flight: Flight, result: StepResult) -> StepOutput:
        """Apply a step's result; its columns must fit the plan."""
        num_rows = len(flight.rows)
        assert len(result.num_sampled_tokens) == num_rows, f"a result for {num_rows} rows"
        table = self._table
        is_current = table.admission_id[flight.rows] == flight.admission_ids
        is_walked = num_rows <= self._max_walked_rows or result.failed_rows or self._state.stale
        if is_walked:
            output = self._take_one_by_one(flight, result, is_current)
        else:
            output = self._take_columns(flight, result, is_current)
        if output.finished:
            table.keep_running(table.admission_id[table.running_rows] != NOBODY)
        if len(result.num_draft_tokens):
            self.take_drafts(
                flight.rows[is_current],
                result.num_draft_tokens[is_current],
                result.draft_token_ids[np.repeat(is_current, result.num_draft_tokens)],
            )
        return output

    def take_drafts(
        self, rows: IntpArray, num_drafts: Int32Array, draft_token_ids: Int32Array
    ) -> None:
        """Attach proposed drafts to rows; finished ones and those mid-prefill drop theirs.

        Args:
            rows: [num_rows].
            num_drafts: [num_rows].
            draft_token_ids: [sum(num_drafts)].
        """
        if self._state.is_pipelined:
            # The worker keeps them: the step that verifies them has been planned already.
            return
        table = self._table
        is_taken = (table.admission_id[rows] != NOBODY) & ~table.is_prefill_chunk[rows]
        draft_token_ids = draft_token_ids[np.repeat(is_taken, num_drafts)]
        rows, num_drafts = rows[is_taken], num_drafts[is_taken]
        table.num_drafts[rows] = num_drafts
        lines = np.repeat(rows, num_drafts)
        table.draft_ids[lines, _places(num_drafts)] = draft_token_ids

    def _take_columns(
        self, flight: Flight, result: StepResult, is_current: BoolArray
    ) -> StepOutput:
        """All rows at once; those that may have ended are looked at in Python."""
        table = self._table
        sampled = _sampled(flight, result, is_current)
        rows, counts, tokens = sampled.rows, sampled.counts, sampled.token_ids
        self._take_back_rejected(sampled)
        before = table.num_tokens[rows]
        after = before + counts
        may_end = after >= table.length_limit[rows]
        if table.num_walked:
            may_end |= table.is_walked[rows]
        is_single = len(tokens) == len(rows)
        lines = rows if is_single else np.repeat(rows, counts)
        places = before if is_single else np.repeat(before, counts) + _places(counts)
        table.token_ids[lines, places] = tokens
        for stop_ids in table.stop_columns:
            is_stop = tokens == stop_ids[lines]
            if not is_single:
                is_stop = np.logical_or.reduceat(is_stop, np.cumsum(counts) - counts)
            may_end |= is_stop
        ends = self._find_ends(sampled, before, after, may_end)
        table.num_tokens[rows] = after
        if self._state.is_pipelined:
            self._land(rows, after - before)
        finished = tuple(self._state.finish(table.request(row), *end) for row, end in ends)
        if finished and not is_single:
            tokens = tokens[places < np.repeat(after, counts)]
        return StepOutput(
            step_id=flight.step_id,
            keys=table.key[rows],
            num_new_tokens=after - before,
            token_ids=tokens,
            finished=finished,
        )

    def _find_ends(
        self, sampled: _Sampled, before: Int32Array, after: Int32Array, may_end: BoolArray
    ) -> list[tuple[int, End]]:
        """Who ended, and how; what came after an end is cut from `after`."""
        ends = []
        for index in may_end.nonzero()[0].tolist():
            row = int(sampled.rows[index])
            num_tokens = int(before[index])
            num_kept, end = self._first_end(row, num_tokens, int(sampled.counts[index]))
            if end is not None:
                after[index] = num_tokens + num_kept
                ends.append((row, end))
        return ends

    def _take_back_rejected(self, sampled: _Sampled) -> None:
        num_drafts = sampled.num_drafts
        if num_drafts is None:
            return
        table = self._table
        num_rejected = np.where(num_drafts > 0, num_drafts - (sampled.counts - 1), 0)
        table.num_computed[sampled.rows] -= num_rejected
        if self._state.is_pipelined:
            table.num_placeholders[sampled.rows] -= num_rejected

    def _land(self, rows: IntpArray, num_kept: Int32Array) -> None:
        """Tokens that were in flight are known now: blocks they fill get their names."""
        table = self._table
        num_placeholders = table.num_placeholders[rows] - num_kept
        table.num_placeholders[rows] = num_placeholders
        num_known = table.num_computed[rows] - num_placeholders
        due = (num_known >= table.next_block_event[rows]).nonzero()[0]
        for row, count in zip(rows[due].tolist(), num_known[due].tolist(), strict=True):
            self._state.kv.register(row, count)

    def _take_one_by_one(
        self, flight: Flight, result: StepResult, is_current: BoolArray
    ) -> StepOutput:
        """Request by request, in plan order."""
        keys: list[int] = []
        counts: list[int] = []
        kept: list[Int32Array] = []
        finished: list[FinishedRequest] = []
        sampled = result.num_sampled_tokens.tolist()
        offset = 0
        for index, (row, num_sampled) in enumerate(zip(flight.rows.tolist(), sampled, strict=True)):
            tokens = result.token_ids[offset : offset + num_sampled]
            offset += num_sampled
            end: End | None
            if not is_current[index]:
                request = self._state.stale.get(int(flight.admission_ids[index]))
                if request is None:
                    continue
                num_kept, end = self._take_stale(request, tokens, int(flight.num_scheduled[index]))
            else:
                request = self._table.request(row)
                if row in result.failed_rows:
                    num_kept, end = 0, (RequestStatus.ERROR, None)
                elif num_sampled == 0:
                    continue
                else:
                    num_kept, end = self._take(row, tokens, flight.num_drafts_of(index))
            if num_kept:
                keys.append(request.key)
                counts.append(num_kept)
                kept.append(tokens[:num_kept])
            if end is not None:
                finished.append(self._state.finish(request, *end))
        return StepOutput(
            step_id=flight.step_id,
            keys=np.array(keys, dtype=np.int64),
            num_new_tokens=np.array(counts, dtype=np.int32),
            token_ids=kept[0] if len(kept) == 1 else np.concatenate(kept or [EMPTY_INT32]),
            finished=tuple(finished),
        )

    def _take(self, row: int, tokens: Int32Array, num_drafts: int) -> tuple[int, End | None]:
        """Give a running row its tokens; how many it kept, and its end if it ended."""
        table = self._table
        if num_drafts:
            num_rejected = num_drafts - (len(tokens) - 1)
            table.num_computed[row] -= num_rejected
            if self._state.is_pipelined:
                table.num_placeholders[row] -= num_rejected
        num_tokens = table.num_tokens.item(row)
        table.token_ids[row, num_tokens : num_tokens + len(tokens)] = tokens
        num_kept, end = self._first_end(row, num_tokens, len(tokens))
        table.num_tokens[row] = num_tokens + num_kept
        if self._state.is_pipelined:
            num_placeholders = table.num_placeholders.item(row) - num_kept
            table.num_placeholders[row] = num_placeholders
            self._state.kv.register(row, table.num_computed.item(row) - num_placeholders)
        return num_kept, end

    def _first_end(self, row: int, num_tokens: int, num_new: int) -> tuple[int, End | None]:
        """Of new tokens behind num_tokens: how many are kept, and the end that the last makes."""
        table = self._table
        request = table.request(row)
        line = table.token_ids[row]
        for num_kept in range(1, num_new + 1):
            end = stop_status(request, line[: num_tokens + num_kept], self._max_num_tokens)
            if end is not None:
                return num_kept, end
        return num_new, None

    def _take_stale(
        self, request: Request, tokens: Int32Array, num_scheduled: int
    ) -> tuple[int, End | None]:
        """Deliver output from before a preemption; counters restarted then, so they stay."""
        request.num_stale_tokens -= num_scheduled
        if request.drop_stale:
            return 0, None
        for num_kept, token in enumerate(tokens, start=1):
            request.token_ids = np.append(request.token_ids, token)
            end = stop_status(request, request.token_ids, self._max_num_tokens)
            if end is not None:
                return num_kept, end
        return len(tokens), None


def _sampled(flight: Flight, result: StepResult, is_current: BoolArray) -> _Sampled:
    """Who got tokens and is still there."""
    counts = result.num_sampled_tokens
    is_taken = is_current & (counts > 0)
    if np.count_nonzero(is_taken) == len(counts):
        return _Sampled(flight.rows, counts, result.token_ids, flight.num_drafts)
    return _Sampled(
        flight.rows[is_taken],
        counts[is_taken],
        result.token_ids[np.repeat(is_taken, counts)],
        None if flight.num_drafts is None else flight.num_drafts[is_taken],
    )


def _places(counts: Int32Array) -> Int32Array:
    """[sum(counts)] 0, 1, .. within each count."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - np.repeat(ends - counts, counts).astype(np.int32)
