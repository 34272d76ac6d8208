"""A core that serves running requests one by one: the rules once more, without columns.

An oracle for the core, which serves all rows with a few vector operations.
"""

from typing import Any

import numpy as np

from scheduler.core.batch import StepBatch
from scheduler.core.plan import EMPTY_INT32, RequestStatus, StepOutput, StepResult
from scheduler.core.request_table import NO_ADMISSION
from scheduler.core.running_pass import RunningPass
from scheduler.core.state import Flight, SchedulerState
from scheduler.core.stop import stop_status
from scheduler.core.update import OutputUpdate
from scheduler.replay.recorder import Recorder


class PlainRecorder(Recorder):
    """A recorded core with the plain passes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running_pass = PlainRunningPass(self.state)
        self._update = PlainUpdate(self.state)


class PlainRunningPass(RunningPass):
    """Row after row, each with the victims that it takes."""

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        self.state = state
        self.config = state.config

    def run(self, batch: StepBatch) -> None:
        table = self.state.table
        position = 0
        while batch.budget > 0 and position < table.num_running:
            position = self.serve(batch, position)
        if table.num_long and batch.long_budget <= 0 < batch.budget:
            self._note_held(batch)

    def serve(self, batch: StepBatch, position: int) -> int:
        state, table = self.state, self.state.table
        row = int(table.running_rows[position])
        num_new = self.num_new(batch, row)
        if num_new <= 0:
            return position + 1
        after = table.num_computed.item(row) + num_new
        num_blocks = state.kv.blocks_for(after + state.kv.num_lookahead)
        num_missing = max(num_blocks - table.num_blocks.item(row), 0)
        while num_missing > state.kv.pool.num_free:
            victim_position = state.policy.victim_position(table)
            victim_row = int(table.running_rows[victim_position])
            position -= state.displace(batch, victim_position, table.request(row), num_missing)
            if victim_row == row:
                return table.num_running
        first = table.num_blocks.item(row)
        block_ids = state.kv.pool.allocate(num_missing)
        table.block_table[row, first : first + num_missing] = block_ids
        table.num_blocks[row] = first + num_missing
        batch.grow([row] * num_missing, block_ids)
        register(state, row, after)
        goal = table.num_tokens.item(row) + table.num_placeholders.item(row)
        num_drafts = min(max(after - goal, 0), table.num_drafts.item(row))
        batch.add(row, table.num_computed.item(row), num_new, goal, num_drafts)
        if table.is_long[row] and table.is_prefill_chunk[row]:
            batch.long_budget -= num_new
        return position + 1

    def num_new(self, batch: StepBatch, row: int) -> int:
        table, config = self.state.table, self.config
        num_computed = table.num_computed.item(row)
        num_placeholders = table.num_placeholders.item(row)
        will_have = num_computed + 2 - num_placeholders
        if num_placeholders > 0 and will_have >= table.output_limit.item(row):
            return 0
        if batch.is_deferring_prefills and table.is_prefill_chunk[row]:
            return 0
        num_known = table.num_tokens.item(row) + table.num_drafts.item(row) + num_placeholders
        num_new = num_known - num_computed
        if 0 < config.long_prefill_token_threshold < num_new:
            num_new = config.long_prefill_token_threshold
        num_new = min(num_new, config.max_model_len - 1 - num_computed)
        if table.is_long[row] and table.is_prefill_chunk[row]:
            num_new = min(num_new, batch.long_budget - self.num_for_others(batch, row))
        return min(num_new, batch.budget)

    def num_for_others(self, batch: StepBatch, row: int) -> int:
        """What long prefills behind a row in the running order get before it."""
        table, policy = self.state.table, self.state.policy
        if not policy.merges_queues:
            return 0
        total = 0
        rank = policy.rank(table.request(row), 0)
        order = table.running_rows.tolist()
        for other in order[order.index(row) + 1 :]:
            is_long = table.is_long[other] and table.is_prefill_chunk[other]
            if is_long and policy.rank(table.request(other), 0) < rank:
                unlimited = StepBatch(0, 0.0, 2**30)
                unlimited.long_budget = 2**30
                unlimited.is_deferring_prefills = batch.is_deferring_prefills
                total += max(self.num_new(unlimited, other), 0)
        return total


class PlainUpdate(OutputUpdate):
    """Request after request, in the order of the plan."""

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        self.state = state

    def run(self, flight: Flight, result: StepResult) -> StepOutput:
        table = self.state.table
        is_current = table.admission_id[flight.rows] == flight.admission_ids
        kept, finished, offset = [], [], 0
        for index, count in enumerate(result.num_sampled_tokens.tolist()):
            tokens = result.token_ids[offset : offset + count]
            offset += count
            row, num_scheduled = int(flight.rows[index]), int(flight.num_scheduled[index])
            if not is_current[index]:
                request = self.state.stale.get(int(flight.admission_ids[index]))
                if request is None:
                    continue
                num_kept, end = self.take_stale(request, tokens, num_scheduled)
            else:
                request = table.request(row)
                if row in result.failed_rows:
                    num_kept, end = 0, (RequestStatus.ERROR, None)
                elif not count:
                    continue
                else:
                    num_drafts = 0 if flight.num_drafts is None else int(flight.num_drafts[index])
                    num_kept, end = self.take(row, tokens, num_drafts)
            if num_kept:
                kept.append((request.key, tokens[:num_kept]))
            if end is not None:
                finished.append(self.state.finish(request, *end))
        if finished:
            table.keep_running(table.admission_id[table.running_rows] != NO_ADMISSION)
        if len(result.num_draft_tokens):
            self.take_drafts(
                flight.rows[is_current],
                result.num_draft_tokens[is_current],
                result.draft_token_ids[np.repeat(is_current, result.num_draft_tokens)],
            )
        return StepOutput(
            step_id=flight.step_id,
            keys=np.array([key for key, _ in kept], dtype=np.int64),
            num_new_tokens=np.array([len(tokens) for _, tokens in kept], dtype=np.int32),
            token_ids=np.concatenate([tokens for _, tokens in kept] or [EMPTY_INT32]),
            finished=tuple(finished),
        )

    def take(self, row: int, tokens: Any, num_drafts: int) -> tuple[int, Any]:
        state, table = self.state, self.state.table
        num_rejected = num_drafts - (len(tokens) - 1) if num_drafts else 0
        table.num_computed[row] -= num_rejected
        if state.is_pipelined:
            table.num_placeholders[row] -= num_rejected
        num_kept, end = 0, None
        for token in tokens.tolist():
            table.token_ids[row, table.num_tokens[row]] = token
            table.num_tokens[row] += 1
            num_kept += 1
            end = stop_status(table.request(row), table.tokens(row), state.config.max_num_tokens)
            if end is not None:
                break
        if state.is_pipelined:
            table.num_placeholders[row] -= num_kept
            register(state, row, int(table.num_computed[row] - table.num_placeholders[row]))
        return num_kept, end

    def take_stale(self, request: Any, tokens: Any, num_scheduled: int) -> tuple[int, Any]:
        request.num_stale_tokens -= num_scheduled
        if request.drop_stale:
            return 0, None
        for num_kept, token in enumerate(tokens.tolist(), start=1):
            request.token_ids = np.append(request.token_ids, np.int32(token))
            limit = self.state.config.max_num_tokens
            if (end := stop_status(request, request.token_ids, limit)) is not None:
                return num_kept, end
        return len(tokens), None


def register(state: SchedulerState, row: int, num_computed: int) -> None:
    """Register the blocks of a row that its known, computed tokens fill."""
    table, config = state.table, state.config
    if not config.enable_prefix_caching:
        return
    num_full = min(num_computed, table.num_tokens.item(row)) // config.block_size
    hashes = table.request(row).block_hashes
    hashes.extend(table.token_ids[row], num_full)
    for index in range(table.num_registered.item(row), num_full):
        state.kv.pool.register([table.block_table.item(row, index)], [hashes.digests[index]])
        table.num_registered[row] = index + 1
