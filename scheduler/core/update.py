"""Takes a step's sampled tokens: appends them, takes back rejected drafts, ends who is done.

One token for everybody, as most steps give, is a few vector operations; else tokens are taken
request by request. Both do the same (tests/properties).
"""

import numpy as np

from scheduler.core.plan import (
    FinishedRequest,
    Int32Array,
    Int64Array,
    RequestStatus,
    StepOutput,
    StepResult,
)
from scheduler.core.request import NO_ROW, Request
from scheduler.core.request_table import NOBODY, BoolArray, IntpArray
from scheduler.core.state import Flight, SchedulerState
from scheduler.core.stop import stop_status

MAX_WALKED_ROWS = 2


class OutputUpdate:
    """The second half of a round: what came back changes the running set."""

    def __init__(self, state: SchedulerState, *, max_walked_rows: int | None = None) -> None:
        self._state = state
        self._table = state.table
        self._max_model_len = state.config.max_model_len
        self._max_walked_rows = MAX_WALKED_ROWS if max_walked_rows is None else max_walked_rows

    def run(self, flight: Flight, result: StepResult) -> StepOutput:
        """Apply a step's result.

        Raises:
            ValueError: columns of the result do not fit the plan.
        """
        _check(flight, result)
        table = self._table
        is_current = table.admission_id[flight.rows] == flight.admission_ids
        if self._is_plain(flight, result, is_current):
            output = self._take_one_by_one(flight, result, is_current)
        else:
            output = self._take_columns(flight, result, is_current)
        if output.finished:
            rows = table.running_rows
            table.keep_running(table.admission_id[rows] != NOBODY)
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
        """Attach proposed drafts to running rows; those mid-prefill drop theirs."""
        table = self._table
        ends = np.cumsum(num_drafts)
        for row, count, end in zip(rows.tolist(), num_drafts.tolist(), ends.tolist(), strict=True):
            if table.requests[row] is None or table.is_prefill_chunk[row]:
                continue
            table.num_drafts[row] = count
            table.draft_ids[row, :count] = draft_token_ids[end - count : end]

    def _is_plain(self, flight: Flight, result: StepResult, is_current: BoolArray) -> bool:
        return True

    def _take_columns(
        self, flight: Flight, result: StepResult, is_current: BoolArray
    ) -> StepOutput:
        raise NotImplementedError

    def _take_one_by_one(
        self, flight: Flight, result: StepResult, is_current: BoolArray
    ) -> StepOutput:
        """Request by request, in plan order."""
        keys: list[int] = []
        counts: list[int] = []
        kept: list[Int32Array] = []
        finished: list[FinishedRequest] = []
        ends = np.cumsum(result.num_sampled_tokens).tolist()
        sampled = result.num_sampled_tokens.tolist()
        for index, (row, num_sampled) in enumerate(zip(flight.rows.tolist(), sampled, strict=True)):
            tokens = result.token_ids[ends[index] - num_sampled : ends[index]]
            if is_current[index]:
                request = self._table.request(row)
                if row in result.failed_rows:
                    finished.append(self._state.finish(request, RequestStatus.ERROR))
                    continue
                num_kept, end = self._take(row, tokens, _num_drafts(flight, index))
            else:
                stale = self._state.stale.get(int(flight.admission_ids[index]))
                if stale is None or stale.status.is_finished:
                    continue
                request = stale
                num_kept, end = self._take_stale(request, tokens, int(flight.num_scheduled[index]))
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
            token_ids=np.concatenate(kept) if kept else np.empty(0, np.int32),
            finished=tuple(finished),
        )

    def _take(
        self, row: int, tokens: Int32Array, num_drafts: int
    ) -> tuple[int, tuple[RequestStatus, int | None] | None]:
        """Give a running row its tokens; how many it kept, and its end if it ended."""
        table = self._table
        if not len(tokens):
            return 0, None
        if num_drafts:
            num_rejected = num_drafts - (len(tokens) - 1)
            table.num_computed[row] -= num_rejected
            if self._state.is_pipelined:
                table.num_placeholders[row] -= num_rejected
        request = table.request(row)
        num_tokens = table.num_tokens.item(row)
        line = table.token_ids[row]
        num_kept, end = 0, None
        for token in tokens.tolist():
            line[num_tokens + num_kept] = token
            num_kept += 1
            end = stop_status(request, line[: num_tokens + num_kept], self._max_model_len)
            if end is not None:
                break
        table.num_tokens[row] = num_tokens + num_kept
        if self._state.is_pipelined:
            num_placeholders = table.num_placeholders.item(row) - num_kept
            table.num_placeholders[row] = num_placeholders
            self._state.kv.register(row, table.num_computed.item(row) - num_placeholders)
        return num_kept, end

    def _take_stale(
        self, request: Request, tokens: Int32Array, num_scheduled: int
    ) -> tuple[int, tuple[RequestStatus, int | None] | None]:
        """Deliver output from before a preemption; counters restarted then, so they stay."""
        request.num_stale_tokens -= num_scheduled
        if request.drop_stale:
            return 0, None
        for num_kept, token in enumerate(tokens.tolist(), start=1):
            request.token_ids = np.append(request.token_ids, np.int32(token))
            end = stop_status(request, request.token_ids, self._max_model_len)
            if end is not None:
                return num_kept, end
        return len(tokens), None


def _num_drafts(flight: Flight, index: int) -> int:
    return 0 if flight.num_drafts is None else int(flight.num_drafts[index])


def _check(flight: Flight, result: StepResult) -> None:
    if result.step_id != flight.step_id:
        raise ValueError(f"result of step {result.step_id}, expected step {flight.step_id}")
    if len(result.num_sampled_tokens) != len(flight.rows):
        raise ValueError(f"{len(result.num_sampled_tokens)} results for {len(flight.rows)} rows")
