"""The last steps of a worker: what each came to, and of the latest ones which requests were in it.

Kept per worker, over all its engines: NUM_STEPS steps (five minutes of steps of 20 ms) in 2.3 MB,
which an idle worker does not touch; and of at most NUM_BATCHES steps the batch, in at most 25 bytes
a row for MAX_BATCH_ROWS rows, 6.5 MB.
"""

import struct
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from scheduler.core.plan import BoolArray, Int32Array, KvBlocks, StepFacts, StepPlan, WaitReason

NUM_STEPS = 16_384
NUM_BATCHES = 600
MAX_BATCH_ROWS = 1 << 18

WAIT_REASONS = tuple(WaitReason)
_INDEX_BY_REASON = {reason: index for index, reason in enumerate(WAIT_REASONS)}
_BEHIND_HEAD = _INDEX_BY_REASON[WaitReason.BEHIND_HEAD]
_CLIENT = _INDEX_BY_REASON[WaitReason.CLIENT]
_NONE_WAIT = (0,) * len(WAIT_REASONS)

# As StepRecord: two integers, three times, eleven counts; and a count for each reason to wait.
_RECORD = struct.Struct(f"<2Q3d11I{len(WAIT_REASONS)}I")


class StepRecord(NamedTuple):
    """A step as it is kept. Times are in seconds; counts of requests and blocks are the plan's.

    position grows from step to step of a worker: the microsecond of the epoch in which the result
    came. start_s is since the epoch. num_waiting has a count for each of WAIT_REASONS.
    """

    position: int
    step_id: int
    start_s: float
    duration_s: float
    gap_s: float
    num_prefill_tokens: int
    num_decode_tokens: int
    num_speculative_tokens: int
    num_idle_tokens: int
    num_generated_tokens: int
    num_requests: int
    num_running: int
    num_preemptions: int
    num_held_blocks: int
    num_cached_blocks: int
    num_empty_blocks: int
    num_waiting: tuple[int, ...]


class OpenStep(NamedTuple):
    """What is known of a step when its plan is sent.

    token_budget: prefill, decode, speculative and idle tokens. request_ids has the request of each
    row; the row assignments of later plans go into other lists.
    """

    token_budget: tuple[int, int, int, int]
    gap_s: float
    num_running: int
    num_waiting: Sequence[int]
    kv_blocks: KvBlocks
    request_ids: Sequence[str]


class RowKind(Enum):
    """What a request's tokens in a step are."""

    PREFILL_CHUNK = "prefill chunk"
    PREFILL = "prefill"
    DECODE = "decode"
    SPECULATIVE = "speculative"


class BatchRow(NamedTuple):
    """A request in a step; num_tokens include its drafts."""

    request_id: str
    num_tokens: int
    num_drafts: int
    num_computed_tokens: int
    kind: RowKind


# Position, the request of each of the worker's rows, and of the plan, [num_reqs] each: rows,
# scheduled tokens, drafts (or [0]), computed tokens, and whether the prefill goes on.
_Batch = tuple[int, Sequence[str], Int32Array, Int32Array, Int32Array, Int32Array, BoolArray]


def waiting_by_reason(facts: StepFacts, num_waiting: int, num_paused: int) -> Sequence[int]:
    """A count for each of WAIT_REASONS; requests that no step looked at are behind the head.

    num_waiting are the requests without a row that are not paused.
    """
    if not (num_waiting or num_paused):
        return _NONE_WAIT
    counts = [*_NONE_WAIT]
    for fact in facts.passed_over[:num_waiting]:
        counts[_INDEX_BY_REASON[fact.reason]] += 1
        num_waiting -= 1
    counts[_BEHIND_HEAD] += max(0, num_waiting)
    counts[_CLIENT] += num_paused
    return counts


class StepFeed:
    """The steps of one worker; the engine of the moment adds to them."""

    def __init__(self) -> None:
        # Pages that were never written take no memory.
        self._buffer = np.zeros(NUM_STEPS * _RECORD.size, dtype=np.uint8).data
        self._num_added = 0
        self._last_position = 0
        self._batches: deque[_Batch] = deque()
        self._num_batch_rows = 0

    def add(
        self, step: OpenStep, plan: StepPlan, duration_s: float, num_tokens: int, now_unix_s: float
    ) -> None:
        """A step's result came at now_unix_s, of which requests kept num_tokens tokens."""
        self._last_position = position = max(self._last_position + 1, int(now_unix_s * 1e6))
        budget, gap_s, num_running, num_waiting, blocks, request_ids = step
        _RECORD.pack_into(
            self._buffer,
            self._num_added % NUM_STEPS * _RECORD.size,
            *(position, plan.step_id, now_unix_s - duration_s, duration_s, gap_s),
            *budget,
            *(num_tokens, len(plan.rows), num_running, len(plan.preempted_keys)),
            *blocks,
            *num_waiting,
        )
        self._num_added += 1
        self._batches.append(
            (
                *(
                    position,
                    request_ids,
                    plan.rows,
                    plan.num_scheduled_tokens,
                    plan.num_draft_tokens,
                ),
                *(plan.num_computed_tokens, plan.is_prefill_chunk),
            )
        )
        # A list of ids is as long as the worker has rows, whatever the step's rows.
        self._num_batch_rows += len(request_ids)
        while len(self._batches) > NUM_BATCHES or self._num_batch_rows > MAX_BATCH_ROWS:
            self._num_batch_rows -= len(self._batches.popleft()[1])

    def after(self, position: int, max_num: int) -> tuple[list[StepRecord], bool]:
        """At most max_num steps after a position, oldest first.

        Returns:
            Also whether a step between the position and these may be missing. Not for position 0.
        """
        oldest = max(0, self._num_added - NUM_STEPS)
        kept = range(oldest, self._num_added)
        begin = oldest + bisect_right(kept, position, key=self._position_at)
        records = [self._at(number) for number in range(begin, min(begin + max_num, kept.stop))]
        return records, bool(records) and 0 < oldest == begin and position > 0

    def batch(self, position: int) -> tuple[StepRecord, list[BatchRow]] | None:
        """A step and the requests in it; None if they are not kept (any more)."""
        found = next((batch for batch in self._batches if batch[0] == position), None)
        if found is None:
            return None
        records, _ = self.after(position - 1, 1)
        return records[0], list(_rows(found))

    def _at(self, number: int) -> StepRecord:
        values = _RECORD.unpack_from(self._buffer, number % NUM_STEPS * _RECORD.size)
        num_single = len(StepRecord._fields) - 1
        return StepRecord._make((*values[:num_single], values[num_single:]))

    def _position_at(self, number: int) -> int:
        return self._at(number).position


def _rows(batch: _Batch) -> Iterator[BatchRow]:
    _, request_ids, *columns = batch
    rows, scheduled, drafts, computed, is_prefill_chunk = (column.tolist() for column in columns)
    drafts = drafts or [0] * len(rows)
    for row, num_tokens, num_drafts, num_computed, is_chunk in zip(
        rows, scheduled, drafts, computed, is_prefill_chunk, strict=True
    ):
        if is_chunk:
            kind = RowKind.PREFILL_CHUNK
        elif num_tokens - num_drafts > 1:
            kind = RowKind.PREFILL
        else:
            kind = RowKind.SPECULATIVE if num_drafts else RowKind.DECODE
        yield BatchRow(request_ids[row], num_tokens, num_drafts, num_computed, kind)
