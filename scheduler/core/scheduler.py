"""The scheduling core of one worker: requests and results in, plans and outputs out.

The core decides for each step how many tokens every request advances, which KV blocks they take,
and which requests are preempted. It knows no clock, no wire format and no tensor; `now` is an
argument.
"""

from collections.abc import Container

import numpy as np

from scheduler.core.audit import BookAudit, RowTables, audit, row_tables
from scheduler.core.batch import BatchColumns, StepBatch
from scheduler.core.explain import History, RequestExplanation
from scheduler.core.long_prefills import long_prefill_budget
from scheduler.core.plan import (
    EMPTY_INT32,
    BoolArray,
    FinishedRequest,
    Int32Array,
    KvBlocks,
    NewRequest,
    Pause,
    PrefixCacheStats,
    RequestStatus,
    ResetOutcome,
    SchedulerConfig,
    StepOutput,
    StepPlan,
    StepResult,
    WaitReason,
)
from scheduler.core.request import Request
from scheduler.core.request_table import IntpArray
from scheduler.core.running_pass import RunningPass
from scheduler.core.state import Flight, SchedulerState
from scheduler.core.update import OutputUpdate
from scheduler.core.waiting_pass import WaitingPass


class SchedulerCore:
    """Plans steps. One loop owns it, and passes results in the order of the plans."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        # Recordings and tests read it; only this class's methods change it.
        self.state = SchedulerState(config)
        self._running_pass = RunningPass(self.state)
        self._waiting_pass = WaitingPass(self.state)
        self._update = OutputUpdate(self.state)
        # Whether the last step left a prefill unfinished.
        self._is_prefilling = True

    @property
    def num_running(self) -> int:
        """Requests that hold a row."""
        return self.state.table.num_running

    @property
    def num_waiting(self) -> int:
        """Requests in the queues, including preempted and blocked ones, without paused ones."""
        return len(self.state.queues)

    @property
    def num_paused(self) -> int:
        """Requests that wait until their clients read."""
        return len(self.state.queues.paused)

    @property
    def num_free_blocks(self) -> int:
        """Unreferenced blocks, including cached ones."""
        return self.state.kv.pool.num_free

    @property
    def kv_blocks(self) -> KvBlocks:
        """All blocks by who needs them."""
        pool = self.state.kv.pool
        num_cached = pool.num_free_cached
        return KvBlocks(pool.num_usable - pool.num_free, num_cached, pool.num_free - num_cached)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is left."""
        return bool(self.state.requests)

    @property
    def has_news(self) -> bool:
        """Whether a later plan has to tell the worker of rows that are free or leases that end."""
        return bool(self.state.freed_rows or self.state.leases.has_any)

    def add_request(self, request: NewRequest, now: float) -> None:
        """Queue a request; `refusal` must have returned None for it."""
        assert request.key not in self.state.requests, f"key {request.key} is in use"
        self.state.now = now
        self.state.add(request, now)

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str | None:
        """Why such a request can never be served here, or None."""
        config = self.config
        if num_prompt_tokens < 1:
            return "the prompt is empty"
        if max_tokens < 1:
            return "max_tokens must be at least 1"
        if num_prompt_tokens >= config.max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens; with at least one more the limit is "
                f"max_model_len = {config.max_model_len}"
            )
        if num_prompt_tokens >= config.max_num_tokens:
            num_blocks = -(-(num_prompt_tokens + config.num_lookahead_tokens) // config.block_size)
            return (
                f"the prompt has {num_prompt_tokens} tokens and needs {num_blocks} KV blocks; "
                f"there are {config.num_gpu_blocks - 1}"
            )
        return None

    def mark_ready(self, request_id: str) -> None:
        """Note that a request's grammar is compiled; unknown ids are ignored."""
        queues = self.state.queues
        for request in (*queues, *queues.paused.values()):
            if request.request_id == request_id:
                request.is_ready = True

    def commit_lease(self, lease_id: int) -> None:
        """Note that all blocks of an import have come; nothing happens if the lease has ended."""
        key = self.state.leases.commit(lease_id)
        if key is not None:
            self.state.compute_here(key)

    def end_lease(self, lease_id: int) -> None:
        """End a lease whose transfer failed or is done; nothing happens if it has ended."""
        key = self.state.leases.end(lease_id)
        if key is not None:
            self.state.compute_here(key)

    def pause_request(self, key: int) -> int | None:
        """Pause a request whose client does not read, until `continue_request`.

        The request loses its row and its blocks and leaves the queues. Its output in flight is
        still delivered, and its deadline still holds. Nothing happens if the request is unknown or
        paused already.

        Returns:
            Computed tokens that the request lost; None if it was not running.
        """
        request = self.state.requests.get(key)
        if request is None or request.is_paused:
            return None
        was_running = request.row >= 0
        num_lost = self.state.pause_request(request)
        return num_lost if was_running else None

    def continue_request(self, key: int) -> None:
        """Queue a paused request again; nothing happens if it is not paused."""
        request = self.state.requests.get(key)
        if request is not None and request.is_paused:
            self.state.unpause_request(request)

    def abort(
        self, key: int, status: RequestStatus = RequestStatus.ABORTED
    ) -> FinishedRequest | None:
        """End a request and free its blocks now; None if it is unknown or has ended."""
        return self.state.end(key, status)

    def output_token_ids(self, key: int, start: int = 0) -> Int32Array | None:
        """[num_tokens] a copy of a request's generated tokens from `start` on; None if it ended."""
        request = self.state.requests.get(key)
        if request is None:
            return None
        is_running = request.row >= 0
        token_ids = self.state.table.tokens(request.row) if is_running else request.token_ids
        return token_ids[request.num_prompt_tokens + start :].copy()

    def set_pause(self, pause: Pause) -> None:
        """Stop admissions, or all scheduling, from the next step on."""
        self.state.pause = pause

    def reset_prefix_cache(self, *, reset_running: bool) -> ResetOutcome:
        """Evict all cached contents; only possible when no request holds a block.

        Args:
            reset_running: preempt all running requests first, the youngest first. Their output in
                flight is dropped, and the next step may admit them again.
        """
        state = self.state
        preempted = []
        while reset_running and state.table.num_running:
            row = state.table.stop_running(state.table.num_running - 1)
            preempted.append(state.preempt(row, cause=None).key)
        is_reset = state.kv.pool.num_free == state.kv.pool.num_usable
        if is_reset:
            state.kv.pool.forget_all()
        return ResetOutcome(is_reset, tuple(preempted))

    def schedule(self, now: float, *, throttle_prefills: bool = False) -> StepPlan:
        """Plan the next step."""
        batch = self._begin_step(now, throttle_prefills=throttle_prefills)
        expired = self.state.expire()
        if self.state.pause is not Pause.PAUSED_ALL:
            self._running_pass.run(batch)
        if batch.victims:
            self._waiting_pass.admit_none(batch, WaitReason.PREEMPTION)
        elif self.state.pause is not Pause.UNPAUSED:
            self._waiting_pass.admit_none(batch, WaitReason.PAUSED)
        else:
            self._waiting_pass.run(batch)
        columns = batch.columns()
        after = columns.num_computed + columns.num_scheduled
        plan = self._plan(batch, columns, after < columns.goals, expired)
        self._advance(batch, columns, after, plan.is_prefill_chunk)
        return plan

    def update(self, result: StepResult, now: float) -> StepOutput:
        """Apply the result of the oldest step without one; empty steps need no result."""
        if not len(result.num_sampled_tokens):
            return StepOutput(
                step_id=result.step_id,
                keys=np.empty(0, np.int64),
                num_new_tokens=EMPTY_INT32,
                token_ids=EMPTY_INT32,
                finished=(),
            )
        self.state.now = now
        flight = self.state.flights[0]
        assert result.step_id == flight.step_id, f"step {result.step_id} is not {flight.step_id}"
        self.state.flights.popleft()
        for history in flight.prefilled:
            history.got_token(now)
        output = self._update.run(flight, result)
        if self.state.stale:
            self.state.forget_delivered()
        return output

    def explain(self, request_id: str, now: float | None = None) -> RequestExplanation | None:
        """A request's history up to now, or up to the last call; None if none is kept."""
        state = self.state
        for position, request in enumerate(state.queues):
            if request.request_id == request_id:
                return self._explain(request, now, position)
        for request in state.requests.values():
            if request.request_id == request_id:
                return self._explain(request, now)
        return state.ledger.ended(request_id)

    def explain_live(self, key: int, now: float) -> RequestExplanation | None:
        """The history of a live request; None if it is unknown or ended."""
        request = self.state.requests.get(key)
        return None if request is None else self._explain(request, now)

    def _explain(
        self, request: Request, now: float | None, position: int | None = None
    ) -> RequestExplanation:
        state = self.state
        now = state.now if now is None else max(now, state.now)
        num_computed = state.table.num_computed.item(request.row) if request.row >= 0 else 0
        return request.history.explain(state.step_id, now, request.status, num_computed, position)

    def update_drafts(
        self, keys: list[int], num_drafts: Int32Array, draft_token_ids: Int32Array
    ) -> None:
        """Attach drafts that came apart from a result; see OutputUpdate.take_drafts.

        Args:
            keys: requests.
            num_drafts: [len(keys)].
            draft_token_ids: [sum(num_drafts)].
        """
        requests = [self.state.requests.get(key) for key in keys]
        is_running = np.array([r is not None and r.row >= 0 for r in requests], dtype=np.bool_)
        rows = [r.row for r in requests if r is not None and r.row >= 0]
        self._update.take_drafts(
            np.array(rows, dtype=np.intp),
            num_drafts[is_running],
            draft_token_ids[np.repeat(is_running, num_drafts)],
        )

    def take_prefix_cache_stats(self) -> PrefixCacheStats:
        """Statistics of the admissions since the last call."""
        taken, self.state.stats = self.state.stats, PrefixCacheStats()
        return taken

    def _begin_step(self, now: float, *, throttle_prefills: bool) -> StepBatch:
        self.state.now = now
        batch = StepBatch(self.state.step_id, now, self.config.max_num_batched_tokens)
        if throttle_prefills and not self.state.is_saturated:
            table = self.state.table
            is_prefilling = table.is_prefill_chunk[table.running_rows]
            batch.is_deferring_prefills = not is_prefilling.all()
        batch.long_budget = long_prefill_budget(self.state, batch.budget)
        return batch

    def _plan(
        self,
        batch: StepBatch,
        columns: BatchColumns,
        is_prefill_chunk: BoolArray,
        expired: tuple[FinishedRequest, ...],
    ) -> StepPlan:
        state = self.state
        begun_leases, ended_leases = state.leases.take_news()
        num_drafts = draft_ids = EMPTY_INT32
        if columns.num_drafts is not None:
            num_drafts = columns.num_drafts
            is_draft = np.arange(self.config.num_spec_tokens) < num_drafts[:, None]
            draft_ids = state.table.draft_ids[columns.rows][is_draft]
        return StepPlan(
            step_id=batch.step_id,
            freed_rows=state.take_freed_rows(is_sent_anyhow=len(columns.rows) > 0),
            row_requests=tuple(batch.row_requests),
            appended_block_rows=_taken(batch.grown_rows),
            appended_block_ids=_taken(batch.grown_ids),
            rows=columns.rows.astype(np.int32),
            num_computed_tokens=columns.num_computed,
            num_scheduled_tokens=columns.num_scheduled,
            num_draft_tokens=num_drafts,
            draft_token_ids=draft_ids,
            is_prefill_chunk=is_prefill_chunk,
            admissions=tuple(batch.admissions),
            preempted_keys=tuple(victim.key for victim in batch.victims),
            expired=expired,
            facts=batch.facts(),
            begun_leases=begun_leases,
            ended_leases=ended_leases,
        )

    def _advance(
        self, batch: StepBatch, columns: BatchColumns, after: Int32Array, is_chunk: BoolArray
    ) -> None:
        """Count scheduled tokens as computed, before the worker has run; `after` is the count."""
        state = self.state
        table = state.table
        rows = columns.rows
        step_id = state.step_id
        state.step_id += 1
        if not len(rows):
            return
        table.num_computed[rows] = after
        prefilled: tuple[History, ...] = ()
        if batch.row_requests or self._is_prefilling:
            prefilled = self._prefilled(batch, rows, is_chunk)
        table.is_prefill_chunk[rows] = is_chunk
        self._is_prefilling = bool(np.count_nonzero(is_chunk))
        if self._is_prefilling:
            for row in rows[is_chunk].tolist():
                table.request(row).history.num_chunks += 1
        if self.config.num_spec_tokens:
            # Unscheduled drafts are dropped. In a pipeline the worker keeps the next drafts, and
            # the core counts on num_spec_tokens of them.
            next_drafts = self.config.num_spec_tokens if state.is_pipelined else 0
            table.num_drafts[rows] = np.where(is_chunk, 0, next_drafts)
        if state.is_pipelined:
            num_sampled = (~is_chunk).astype(np.int32)
            if columns.num_drafts is not None:
                num_sampled += np.where(is_chunk, 0, columns.num_drafts)
            table.num_placeholders[rows] += num_sampled
        state.flights.append(
            Flight(
                step_id,
                rows,
                table.admission_id[rows],
                columns.num_scheduled,
                is_chunk,
                columns.num_drafts,
                prefilled,
            )
        )

    def _prefilled(
        self, batch: StepBatch, rows: IntpArray, is_chunk: BoolArray
    ) -> tuple[History, ...]:
        """Histories of the requests whose prefill ends with this step; columns are the step's."""
        table = self.state.table
        is_prefilling = table.is_prefill_chunk.copy()
        is_prefilling[[new.row for new in batch.row_requests]] = True
        ends = rows[is_prefilling[rows] & ~is_chunk].tolist()
        return tuple(table.request(row).history for row in ends)

    def audit(self, live_keys: Container[int] | None = None) -> BookAudit:
        """Walk the book of KV blocks; see `scheduler.core.audit`."""
        return audit(self.state, live_keys)

    def row_tables(self) -> RowTables:
        """The block table of every running row; the worker has them with the last plan."""
        return row_tables(self.state.table)


def _taken(numbers: list[int]) -> Int32Array:
    """The numbers as a column; empties the list."""
    if not numbers:
        return EMPTY_INT32
    column = np.array(numbers, dtype=np.int32)
    numbers.clear()
    return column
