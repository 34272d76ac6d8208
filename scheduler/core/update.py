"""Takes a step's sampled tokens: appends them, takes back rejected drafts, ends requests.

Tokens of all rows are appended and compared with stop ids by a few vector operations; only rows
that may have ended are checked one by one.
"""

from dataclasses import dataclass

import numpy as np

from scheduler.core.plan import (
    EMPTY_INT32,
    BoolArray,
    FinishedRequest,
    Int32Array,
    Int64Array,
    RequestStatus,
    StepOutput,
    StepResult,
)
from scheduler.core.request import Request
from scheduler.core.request_table import NO_ADMISSION, IntpArray
from scheduler.core.state import Flight, SchedulerState
from scheduler.core.stop import End, stop_status


@dataclass(slots=True)
class _Sampled:
    """Rows that got tokens, in plan order, and their tokens, row after row."""

    indexes: IntpArray  # [num_rows] in the plan
    rows: IntpArray  # [num_rows]
    counts: Int32Array  # [num_rows], each at least 1
    token_ids: Int32Array  # [sum(counts)]
    num_drafts: Int32Array | None  # [num_rows]


# A request that ended, and a request's key and kept tokens, each with its index in the plan.
_IndexedEnd = tuple[int, Request, End]
_IndexedTokens = tuple[int, int, Int32Array]
_FAILED: End = (RequestStatus.ERROR, None)


class OutputUpdate:
    """Applies results to the running requests."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._table = state.table
        self._max_num_tokens = state.config.max_num_tokens

    def run(self, flight: Flight, result: StepResult) -> StepOutput:
        """Apply a step's result; its columns must fit the plan."""
        table, counts = self._table, result.num_sampled_tokens
        assert len(counts) == len(flight.rows), f"a result for {len(flight.rows)} rows"
        is_current = table.admission_id[flight.rows] == flight.admission_ids
        is_taken = is_current & (counts > 0)
        ends: list[_IndexedEnd] = []
        if result.failed_rows:
            has_failed = is_current & np.isin(flight.rows, result.failed_rows)
            is_taken &= ~has_failed
            failed = has_failed.nonzero()[0].tolist()
            ends += [(i, table.request(int(flight.rows[i])), _FAILED) for i in failed]
        sampled = _sampled(flight, result, is_taken)
        num_kept = self._append(sampled, ends)
        keys, token_ids = table.key[sampled.rows], sampled.token_ids
        if ends and len(token_ids) > len(keys):
            is_kept = _ranks(sampled.counts) < np.repeat(num_kept, sampled.counts)
            token_ids = token_ids[is_kept]
        if self._state.stale:
            kept = list(
                zip(
                    sampled.indexes.tolist(),
                    keys.tolist(),
                    _split(token_ids, num_kept),
                    strict=True,
                )
            )
            keys, num_kept, token_ids = self._with_stale(flight, result, is_current, kept, ends)
        finished: tuple[FinishedRequest, ...] = ()
        if ends:
            # Blocks become free in the order of the plan.
            ends.sort(key=lambda entry: entry[0])
            finished = tuple(self._state.finish(request, *end) for _, request, end in ends)
            table.keep_running(table.admission_id[table.running_rows] != NO_ADMISSION)
        if len(result.num_draft_tokens):
            self.take_drafts(
                flight.rows[is_current],
                result.num_draft_tokens[is_current],
                result.draft_token_ids[np.repeat(is_current, result.num_draft_tokens)],
            )
        return StepOutput(
            step_id=flight.step_id,
            keys=keys,
            num_new_tokens=num_kept,
            token_ids=token_ids,
            finished=finished,
        )

    def take_drafts(
        self, rows: IntpArray, num_drafts: Int32Array, draft_token_ids: Int32Array
    ) -> None:
        """Attach proposed drafts to rows; rows that ended or are mid-prefill drop theirs.

        Args:
            rows: [num_rows].
            num_drafts: [num_rows].
            draft_token_ids: [sum(num_drafts)].
        """
        if self._state.is_pipelined:
            # The worker keeps the drafts: the step that verifies them has been planned already.
            return
        table = self._table
        is_taken = (table.admission_id[rows] != NO_ADMISSION) & ~table.is_prefill_chunk[rows]
        draft_token_ids = draft_token_ids[np.repeat(is_taken, num_drafts)]
        rows, num_drafts = rows[is_taken], num_drafts[is_taken]
        table.num_drafts[rows] = num_drafts
        lines = np.repeat(rows, num_drafts)
        table.draft_ids[lines, _ranks(num_drafts)] = draft_token_ids

    def _append(self, sampled: _Sampled, ends: list[_IndexedEnd]) -> Int32Array:
        """Give rows their tokens, up to each one's end.

        Returns:
            [num_rows] how many tokens each row kept; the ends are added to `ends`.
        """
        table = self._table
        rows, counts, tokens = sampled.rows, sampled.counts, sampled.token_ids
        self._take_back_rejected(sampled)
        before = table.num_tokens[rows]
        after = before + counts
        may_end = after >= table.length_limit[rows]
        if table.num_walked:
            may_end |= table.is_walked[rows]
        is_single = len(tokens) == len(rows)
        lines = rows if is_single else np.repeat(rows, counts)
        columns = before if is_single else np.repeat(before, counts) + _ranks(counts)
        table.token_ids[lines, columns] = tokens
        for stop_ids in table.stop_columns:
            is_stop = tokens == stop_ids[lines]
            if not is_single:
                is_stop = np.logical_or.reduceat(is_stop, np.cumsum(counts) - counts)
            may_end |= is_stop
        for index in may_end.nonzero()[0].tolist():
            row, num_tokens = int(rows[index]), int(before[index])
            num_kept, end = self._first_end(row, num_tokens, int(counts[index]))
            if end is not None:
                after[index] = num_tokens + num_kept
                ends.append((int(sampled.indexes[index]), table.request(row), end))
        table.num_tokens[rows] = after
        if self._state.is_pipelined:
            self._settle(rows, after - before)
        return after - before

    def _take_back_rejected(self, sampled: _Sampled) -> None:
        """Subtract rejected drafts, which were counted as computed when they were scheduled."""
        num_drafts = sampled.num_drafts
        if num_drafts is None:
            return
        table = self._table
        num_rejected = np.where(num_drafts > 0, num_drafts - (sampled.counts - 1), 0)
        table.num_computed[sampled.rows] -= num_rejected
        if self._state.is_pipelined:
            table.num_placeholders[sampled.rows] -= num_rejected

    def _settle(self, rows: IntpArray, num_kept: Int32Array) -> None:
        """Count tokens in flight as known, and register the blocks that these tokens fill."""
        table = self._table
        num_placeholders = table.num_placeholders[rows] - num_kept
        table.num_placeholders[rows] = num_placeholders
        num_known = table.num_computed[rows] - num_placeholders
        self._state.kv.register(rows, num_known)

    def _with_stale(
        self,
        flight: Flight,
        result: StepResult,
        is_current: BoolArray,
        kept: list[_IndexedTokens],
        ends: list[_IndexedEnd],
    ) -> tuple[Int64Array, Int32Array, Int32Array]:
        """Deliver output from before preemptions, too.

        Returns:
            The StepOutput's keys, num_new_tokens and token_ids of all requests, in plan order.
        """
        sampled = _split(result.token_ids, result.num_sampled_tokens)
        for index in (~is_current).nonzero()[0].tolist():
            request = self._state.stale.get(int(flight.admission_ids[index]))
            if request is None:
                continue
            tokens = sampled[index]
            num_kept, end = self._take_stale(request, tokens, int(flight.num_scheduled[index]))
            if num_kept:
                kept.append((index, request.key, tokens[:num_kept]))
            if end is not None:
                ends.append((index, request, end))
        kept.sort(key=lambda entry: entry[0])
        return (
            np.array([key for _, key, _ in kept], dtype=np.int64),
            np.array([len(tokens) for _, _, tokens in kept], dtype=np.int32),
            np.concatenate([tokens for _, _, tokens in kept] or [EMPTY_INT32]),
        )

    def _first_end(self, row: int, num_tokens: int, num_new: int) -> tuple[int, End | None]:
        """How many of a row's num_new tokens behind num_tokens are kept, and the end, if any."""
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
        """Append output from before a preemption; the request's counters have restarted since."""
        request.num_stale_tokens -= num_scheduled
        if request.drop_stale:
            return 0, None
        for num_kept, token in enumerate(tokens, start=1):
            request.token_ids = np.append(request.token_ids, token)
            end = stop_status(request, request.token_ids, self._max_num_tokens)
            if end is not None:
                return num_kept, end
        return len(tokens), None


def _sampled(flight: Flight, result: StepResult, is_taken: BoolArray) -> _Sampled:
    """The rows whose tokens are taken; is_taken is [num_reqs]."""
    counts, num_drafts = result.num_sampled_tokens, flight.num_drafts
    indexes = is_taken.nonzero()[0]
    if len(indexes) == len(counts):
        return _Sampled(indexes, flight.rows, counts, result.token_ids, num_drafts)
    return _Sampled(
        indexes,
        flight.rows[indexes],
        counts[indexes],
        result.token_ids[np.repeat(is_taken, counts)],
        None if num_drafts is None else num_drafts[indexes],
    )


def _ranks(counts: Int32Array) -> Int32Array:
    """[sum(counts)] 0, 1, .. within each count."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int32) - np.repeat(ends - counts, counts).astype(np.int32)


def _split(token_ids: Int32Array, counts: Int32Array) -> list[Int32Array]:
    """Each count's part of token_ids, one after the other."""
    return np.split(token_ids, np.cumsum(counts)[:-1]) if len(counts) else []
