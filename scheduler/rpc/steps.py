"""Steps and waiting requests for those who watch: what Scheduler.WatchSteps and its kin answer."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable

from headrace.service.errors import not_found
from headrace.v1 import steps_pb2
from scheduler.pool import Pool
from scheduler.step_feed import WAIT_REASONS, BatchRow, RowKind, StepRecord
from scheduler.waiting import Waiting

_INTERVAL_S = 0.25
_HEARTBEAT_S = 1.0
# In one message, over all workers: about 400 kB.
_MAX_STEPS = 4096
_MAX_WAITING = 10_000

_REASONS = tuple(reason.name.lower() for reason in WAIT_REASONS)
_KINDS = {
    RowKind.PREFILL_CHUNK: steps_pb2.StepRow.KIND_PREFILL_CHUNK,
    RowKind.PREFILL: steps_pb2.StepRow.KIND_PREFILL,
    RowKind.DECODE: steps_pb2.StepRow.KIND_DECODE,
    RowKind.SPECULATIVE: steps_pb2.StepRow.KIND_SPECULATIVE,
}


async def watch_steps(
    scheduler_id: str,
    pool: Pool,
    request: steps_pb2.WatchStepsRequest,
    is_closing: Callable[[], bool],
) -> AsyncIterator[steps_pb2.WatchStepsResponse]:
    """The steps of all workers after the positions of the request, until is_closing."""
    begin = int(max(0.0, time.time() - max(0.0, request.history_s)) * 1e6)
    positions = {after.worker_id: after.position for after in request.after}
    last_s = -_HEARTBEAT_S
    while not is_closing():
        response, is_more = _news(scheduler_id, pool, positions, begin)
        now_s = time.monotonic()
        if response.workers or now_s - last_s >= _HEARTBEAT_S:
            last_s = now_s
            yield response
        await asyncio.sleep(0 if is_more else _INTERVAL_S)


def _news(
    scheduler_id: str, pool: Pool, positions: dict[str, int], begin: int
) -> tuple[steps_pb2.WatchStepsResponse, bool]:
    """Steps after the positions, which move on, and whether there are more."""
    feeds = pool.step_feeds()
    max_num = max(1, _MAX_STEPS // max(1, len(feeds)))
    response, is_more = steps_pb2.WatchStepsResponse(), False
    for info, feed in feeds:
        is_known = info.worker_id in positions
        records, has_gap = feed.after(positions.get(info.worker_id, begin), max_num)
        if not records:
            continue
        positions[info.worker_id] = records[-1].position
        is_more |= len(records) == max_num
        response.workers.add(
            worker_id=info.worker_id,
            scheduler_id=scheduler_id,
            model=info.model,
            steps=map(_step, records),
            has_gap=has_gap and is_known,
        )
    return response, is_more


def step_batch(pool: Pool, worker_id: str, position: int) -> steps_pb2.GetStepBatchResponse:
    """The requests of a step.

    Raises:
        ServiceError: no such worker is here, or the step is not one of its latest.
    """
    for info, feed in pool.step_feeds():
        if info.worker_id == worker_id and (found := feed.batch(position)) is not None:
            record, rows = found
            return steps_pb2.GetStepBatchResponse(
                worker_id=worker_id, step=_step(record), rows=map(_row, rows)
            )
    raise not_found(
        "UNKNOWN_STEP", f"the batch of step {position} of worker {worker_id!r} is not kept here"
    )


def waiting_requests(pool: Pool, limit: int) -> steps_pb2.ListWaitingResponse:
    """The first requests that hold no row of a worker, and how many there are."""
    waiting = pool.waiting()
    first = list(itertools.islice(waiting, min(limit, _MAX_WAITING)))
    return steps_pb2.ListWaitingResponse(
        requests=map(_waiting, first), num_waiting=len(first) + sum(1 for _ in waiting)
    )


def _step(record: StepRecord) -> steps_pb2.Step:
    return steps_pb2.Step(
        position=record.position,
        step_id=record.step_id,
        start_time_unix_s=record.start_s,
        duration_s=record.duration_s,
        gap_s=record.gap_s,
        prefill_tokens=record.num_prefill_tokens,
        decode_tokens=record.num_decode_tokens,
        speculative_tokens=record.num_speculative_tokens,
        idle_tokens=record.num_idle_tokens,
        generated_tokens=record.num_generated_tokens,
        num_requests=record.num_requests,
        num_running=record.num_running,
        num_waiting_by_reason={
            reason: count
            for reason, count in zip(_REASONS, record.num_waiting, strict=True)
            if count
        },
        num_preemptions=record.num_preemptions,
        kv_blocks_held=record.num_held_blocks,
        kv_blocks_cached=record.num_cached_blocks,
        kv_blocks_empty=record.num_empty_blocks,
    )


def _row(row: BatchRow) -> steps_pb2.StepRow:
    return steps_pb2.StepRow(
        request_id=row.request_id,
        num_tokens=row.num_tokens,
        num_drafts=row.num_drafts,
        num_computed_tokens=row.num_computed_tokens,
        kind=_KINDS[row.kind],
    )


def _waiting(waiting: Waiting) -> steps_pb2.WaitingRequest:
    submission = waiting.request.submission
    return steps_pb2.WaitingRequest(
        request_id=submission.request_id,
        tenant=submission.tenant,
        model=submission.model,
        num_tokens=waiting.num_tokens,
        priority=submission.priority,
        arrival_time_unix_s=submission.arrival_time,
        worker_id=waiting.worker_id,
        reason=waiting.reason,
        num_needed_blocks=waiting.num_needed_blocks,
        num_free_blocks=waiting.num_free_blocks,
    )
