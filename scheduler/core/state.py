"""The state that the passes of a step share: rows, queues, blocks, and steps in flight.

SchedulerState carries out a request's transitions (preempt, pause, finish); the passes decide them.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from headrace.lazy_heap import LazyHeap
from scheduler.core.batch import StepBatch
from scheduler.core.explain import History, Ledger
from scheduler.core.kv_cache import KvCache
from scheduler.core.leases import Leases
from scheduler.core.plan import (
    EMPTY_INT32,
    BoolArray,
    FinishedRequest,
    Int32Array,
    Int64Array,
    NewRequest,
    Pause,
    PrefixCacheStats,
    RequestStatus,
    SchedulerConfig,
    Victim,
)
from scheduler.core.policy import POLICIES
from scheduler.core.queues import WaitingQueues
from scheduler.core.request import NO_ROW, Request
from scheduler.core.request_table import IntpArray, RequestTable

# An idle worker is not woken for each row that became free.
MAX_FREED_ROW_WAIT_S = 0.1


@dataclass(frozen=True, slots=True)
class Flight:
    """A step without a result; columns are [num_reqs] in plan order."""

    step_id: int
    rows: IntpArray
    admission_ids: Int64Array
    num_scheduled: Int32Array
    is_prefill_chunk: BoolArray
    num_drafts: Int32Array | None
    # Of the requests whose prefill ends with this step.
    prefilled: tuple[History, ...] = ()


class SchedulerState:
    """The owner of a scheduler's mutable state."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.table = RequestTable(config)
        self.kv = KvCache(config, self.table)
        self.leases = Leases(self.kv)
        self.policy = POLICIES[config.policy]
        self.queues = WaitingQueues(self.policy)
        self.ledger = Ledger()
        # The step being planned, or the next step; `now` is the time of the last call.
        self.step_id = 0
        self.now = 0.0
        self._deadlines: LazyHeap[int, int] = LazyHeap()
        self.requests: dict[int, Request] = {}
        self.flights: deque[Flight] = deque()
        # Preempted requests with output in flight, by the id of the output's admission.
        self.stale: dict[int, Request] = {}
        self.freed_rows: list[int] = []
        self._first_freed = 0.0
        self.pause = Pause.UNPAUSED
        # Whether requests were left waiting although prefills were not throttled.
        self.is_saturated = False
        # Of admissions since the last call of take_prefix_cache_stats.
        self.stats = PrefixCacheStats()
        self.is_pipelined = config.pipeline_depth > 1

    def add(self, spec: NewRequest, now: float) -> None:
        """Queue a new request."""
        position, is_recovering = len(self.queues), spec.is_recovering
        history = History(spec.request_id, self.step_id, now, position, is_recovering=is_recovering)
        request = Request(spec, self.config.block_size, history)
        if self.config.enable_prefix_caching:
            # Blocks that the caller has not hashed are hashed here, not within a step.
            num_full = len(request.token_ids) // self.config.block_size
            request.block_hashes.extend(request.token_ids, num_full)
        self.own(request)
        self.queues.add(request)

    def own(self, request: Request) -> None:
        """Register a live request and its deadline; its queue or row is the caller's to set."""
        self.requests[request.key] = request
        if request.spec.deadline is not None:
            self._deadlines.push(request.key, request.spec.deadline, request.key)

    def preempt(self, row: int, cause: Victim | None) -> Request:
        """Free the row and blocks of a request that left the running order, and requeue it.

        Output in flight is still delivered, but dropped without a cause (a reset of the prefix
        cache).
        """
        table = self.table
        request = table.request(row)
        self._note_output_in_flight(request, row, drop_output=cause is None)
        request.history.preempted(
            self.step_id,
            self.now,
            table.num_computed.item(row),
            cause.trigger_id if cause else "",
            cause.num_needed_blocks if cause else 0,
        )
        self._free_row(row)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.queues.waiting.add_front(request)
        return request

    def pause_request(self, request: Request) -> int:
        """Pause a request, running or waiting, until `unpause_request`.

        A running request loses its row and blocks like a preempted request, and its output in
        flight is still delivered.

        Returns:
            Computed tokens that the request lost.
        """
        row, num_computed = request.row, 0
        if row != NO_ROW:
            num_computed = self.table.num_computed.item(row)
            self.table.stop_running(self.table.position(row))
            self._note_output_in_flight(request, row, drop_output=False)
            self._free_row(row)
            request.status = RequestStatus.PREEMPTED
        request.history.paused(self.step_id, self.now, num_computed)
        request.status_after_pause = request.status
        request.status = RequestStatus.WAITING_FOR_CLIENT
        self.queues.pause(request)
        return num_computed

    def unpause_request(self, request: Request) -> None:
        """Queue a paused request again."""
        request.history.unpaused(self.step_id, self.now)
        request.status = request.status_after_pause
        self.queues.unpause(request)

    def displace(
        self, batch: StepBatch, position: int, beneficiary: Request, num_needed: int
    ) -> bool:
        """Preempt the request at a position, because `beneficiary` needs its blocks or its slot.

        Returns:
            Whether the victim had tokens in this step; they are returned to the budget.
        """
        row = self.table.stop_running(position)
        request = self.table.request(row)
        was_scheduled = batch.refund(row)
        # The step was to write these blocks: no later request may find them by their digests.
        self.kv.pool.forget(self.kv.unwritten(row))
        victim = Victim(
            key=request.key,
            request_id=request.request_id,
            trigger_key=beneficiary.key,
            trigger_id=beneficiary.request_id,
            num_needed_blocks=num_needed,
            num_lost_tokens=self.table.num_computed.item(row),
            was_scheduled=was_scheduled,
        )
        self.preempt(row, victim)
        batch.victims.append(victim)
        return was_scheduled

    def finish(
        self, request: Request, status: RequestStatus, stop_token_id: int | None = None
    ) -> FinishedRequest:
        """End a request and free its blocks; the next plan reports its row as free.

        The caller removes the row from the running order.
        """
        num_computed, export = 0, None
        self.leases.end_import_of(request.key)
        if request.row == NO_ROW:
            self.queues.remove(request)
        else:
            num_computed = self.table.num_computed.item(request.row)
            if status is RequestStatus.ERROR:
                self.kv.distrust(request.row)
            elif request.spec.export_s and status is RequestStatus.LENGTH_CAPPED:
                export = self._export(request)
            self._free_row(request.row)
        if request.num_stale_tokens:
            self.stale = {i: other for i, other in self.stale.items() if other is not request}
        request.status = status
        request.history.finished(self.step_id, self.now, num_computed, status)
        self.ledger.keep(request.history)
        del self.requests[request.key]
        self._deadlines.remove(request.key)
        return FinishedRequest(
            request.key,
            request.request_id,
            status,
            stop_token_id,
            request.num_preemptions,
            request.token_ids[request.num_prompt_tokens :],
            export,
        )

    def _export(self, request: Request) -> int | None:
        """Keep the full blocks of a request that ends; the lease."""
        num_blocks = self.table.num_registered.item(request.row)
        if not num_blocks:
            return None
        block_ids = self.table.block_table[request.row, :num_blocks].tolist()
        digests = request.block_hashes.digests[:num_blocks]
        expires_at = self.now + request.spec.export_s
        return self.leases.begin_export(request.key, block_ids, digests, expires_at).lease_id

    def end(self, key: int, status: RequestStatus) -> FinishedRequest | None:
        """End a request, running or waiting; None if it is unknown or has ended."""
        request = self.requests.get(key)
        if request is None:
            return None
        if request.row != NO_ROW:
            self.table.stop_running(self.table.position(request.row))
        return self.finish(request, status)

    def expire(self) -> tuple[FinishedRequest, ...]:
        """End every lease whose time is over, and every request whose deadline has passed."""
        for key in self.leases.expire(self.now):
            self.compute_here(key)
        if not self._deadlines:
            return ()
        due = self._deadlines.pop_through(self.now)
        expired = [self.end(key, RequestStatus.DEADLINE) for key in due]
        return tuple(request for request in expired if request is not None)

    def compute_here(self, key: int) -> None:
        """A request waits for the KV of another worker no longer, whether or not it has come."""
        request = self.requests.get(key)
        if request is not None and request.spec.remote_prefix is not None:
            request.is_ready = True

    def _free_row(self, row: int) -> None:
        self.kv.release(row)
        self.table.vacate(row)
        if not self.freed_rows:
            self._first_freed = self.now
        self.freed_rows.append(row)

    def take_freed_rows(self, *, is_sent_anyhow: bool) -> Int32Array:
        """The rows that a plan reports as free.

        If the plan has nothing else to send, freed rows wait up to MAX_FREED_ROW_WAIT_S for a later
        plan.
        """
        if not self.freed_rows or not (
            is_sent_anyhow or self.now >= self._first_freed + MAX_FREED_ROW_WAIT_S
        ):
            return EMPTY_INT32
        rows = np.array(self.freed_rows, dtype=np.int32)
        self.freed_rows.clear()
        return rows

    def _note_output_in_flight(self, request: Request, row: int, *, drop_output: bool) -> None:
        admission_id = self.table.admission_id.item(row)
        num_in_flight = sum(
            int(flight.num_scheduled[flight.admission_ids == admission_id].sum())
            for flight in self.flights
        )
        # If some of a request's output in flight is to be dropped, all of the output is dropped.
        has_stale = request.num_stale_tokens > 0
        request.drop_stale = drop_output or (request.drop_stale and has_stale)
        if num_in_flight:
            request.num_stale_tokens += num_in_flight
            self.stale[admission_id] = request

    def forget_delivered(self) -> None:
        """Forget requests whose stale output has arrived."""
        awaited = {int(i) for flight in self.flights for i in np.unique(flight.admission_ids)}
        self.stale = {i: request for i, request in self.stale.items() if i in awaited}
