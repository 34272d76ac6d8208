"""What the passes of a step share: running rows, waiting queues, blocks, and steps in flight.

It carries out the transitions of a request (admit, preempt, finish); the passes decide them.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

from scheduler.core.kv_cache import KvCache
from scheduler.core.plan import (
    FinishedRequest,
    Int32Array,
    Int64Array,
    RequestStatus,
    SchedulerConfig,
)
from scheduler.core.queues import WaitingQueues
from scheduler.core.request import NO_ROW, Request
from scheduler.core.request_table import BoolArray, IntpArray, RequestTable


@dataclass(frozen=True, slots=True)
class Flight:
    """A step whose result has not come yet; columns are [num_reqs] in plan order."""

    step_id: int
    rows: IntpArray
    admission_ids: Int64Array
    num_scheduled: Int32Array
    is_prefill_chunk: BoolArray
    num_drafts: Int32Array | None


class SchedulerState:
    """The one owner of a scheduler's mutable state."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.table = RequestTable(config)
        self.kv = KvCache(config, self.table)
        self.queues = WaitingQueues(config.policy)
        self.requests: dict[int, Request] = {}
        self.flights: deque[Flight] = deque()
        # Preempted requests with output in flight, by the admission that the output is from.
        self.stale: dict[int, Request] = {}
        self.freed_rows: list[int] = []
        self.is_pipelined = config.pipeline_depth > 1

    def preempt(self, row: int, *, drop_output: bool) -> Request:
        """Put a request that left the running order back to waiting; its blocks become free.

        Its output in flight is still delivered when it comes, or dropped.
        """
        table = self.table
        request = table.request(row)
        self._note_output_in_flight(request, row, drop_output=drop_output)
        self._free(request, row)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.queues.waiting.push_front(request)
        return request

    def finish(
        self, request: Request, status: RequestStatus, stop_token_id: int | None = None
    ) -> FinishedRequest:
        """End a request: its blocks are free at once, its row is reported by the next plan.

        The caller takes its row out of the running order.
        """
        if request.row == NO_ROW:
            self.queues.remove(request)
        else:
            self._free(request, request.row)
        request.status = status
        del self.requests[request.key]
        return FinishedRequest(
            request.key, request.request_id, status, stop_token_id, request.num_preemptions
        )

    def _free(self, request: Request, row: int) -> None:
        self.kv.release(row)
        self.table.vacate(row)
        self.freed_rows.append(row)

    def _note_output_in_flight(self, request: Request, row: int, *, drop_output: bool) -> None:
        admission_id = self.table.admission_id.item(row)
        num_in_flight = sum(
            int(flight.num_scheduled[flight.admission_ids == admission_id].sum())
            for flight in self.flights
        )
        # Once some of its output is to be dropped, all that is in flight with it is.
        has_undrained = request.num_stale_tokens > 0
        request.drop_stale = drop_output or (request.drop_stale and has_undrained)
        if num_in_flight:
            request.num_stale_tokens += num_in_flight
            self.stale[admission_id] = request

    def forget_drained(self) -> None:
        """Drop the notes about output that can no longer come."""
        awaited = {int(i) for flight in self.flights for i in np.unique(flight.admission_ids)}
        self.stale = {i: request for i, request in self.stale.items() if i in awaited}
