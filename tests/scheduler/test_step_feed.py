"""The step feed: what is kept of each step, for how long, and how it is read without gaps."""

import numpy as np
import pytest

from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.columns import unpack_int32
from headrace.v1 import scheduler_pb2_grpc, steps_pb2
from scheduler import step_feed
from scheduler.config import SchedulerSettings
from scheduler.core.plan import EMPTY_INT32, KvBlocks, StepPlan
from scheduler.step_feed import NUM_BATCHES, NUM_STEPS, OpenStep, RowKind, StepFeed
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import router_to, running_scheduler, until

OPEN = OpenStep((3, 2, 1, 10), 0.25, 4, [0] * 12 + [7], KvBlocks(5, 6, 7), ["a", "b", "c"])


def plan(step_id=0, scheduled=(1, 1, 1), drafts=(), is_chunk=(False, False, False)):
    return StepPlan(
        step_id=step_id,
        freed_rows=EMPTY_INT32,
        row_requests=(),
        appended_block_rows=EMPTY_INT32,
        appended_block_ids=EMPTY_INT32,
        rows=np.array([2, 0, 1], dtype=np.int32),
        num_computed_tokens=np.array([8, 16, 24], dtype=np.int32),
        num_scheduled_tokens=np.array(scheduled, dtype=np.int32),
        num_draft_tokens=np.array(drafts, dtype=np.int32),
        draft_token_ids=EMPTY_INT32,
        is_prefill_chunk=np.array(is_chunk),
        admissions=(),
        preempted_keys=(),
        expired=(),
    )


def test_a_step_comes_out_as_it_went_in():
    feed = StepFeed()
    feed.add(OPEN, plan(9), 0.5, 3, 1_000_000.5)
    ((record,), has_gap) = feed.after(0, 10)
    assert record[:5] == (1_000_000_500_000, 9, 1_000_000.0, 0.5, 0.25)
    assert record[5:10] == (3, 2, 1, 10, 3)
    assert record[10:16] == (3, 4, 0, 5, 6, 7)
    assert record.num_waiting == (0,) * 12 + (7,)
    assert not has_gap


def test_positions_grow_although_the_clock_goes_back():
    feed = StepFeed()
    for now in (50.0, 40.0, 50.000001):
        feed.add(OPEN, plan(), 0.1, 1, now)
    records, _ = feed.after(0, 10)
    assert [record.position for record in records] == [50_000_000, 50_000_001, 50_000_002]


def test_reading_goes_on_after_a_position_and_says_when_steps_are_missing():
    feed = StepFeed()
    for number in range(NUM_STEPS + 5):
        feed.add(OPEN, plan(number), 0.001, 1, 1.0 + number)
    records, has_gap = feed.after(3_000_000, 2)
    assert [record.step_id for record in records] == [5, 6]
    assert has_gap
    again, has_gap = feed.after(records[-1].position, NUM_STEPS)
    assert [record.step_id for record in again] == list(range(7, NUM_STEPS + 5))
    assert not has_gap
    assert feed.after(again[-1].position, 5) == ([], False)
    assert feed.after(0, 1)[1] is False  # this reader had nothing before


def test_only_the_latest_steps_keep_their_batch(monkeypatch):
    feed = StepFeed()
    for number in range(NUM_BATCHES + 1):
        feed.add(OPEN, plan(number), 0.001, 1, 1.0 + number)
    assert feed.batch(1_000_000) is None
    assert feed.batch(2_000_000) is not None
    monkeypatch.setattr(step_feed, "MAX_BATCH_ROWS", 30)  # ten batches of a worker of three rows
    feed.add(OPEN, plan(7), 0.001, 1, 5000.0)
    kept = [n for n in range(NUM_BATCHES + 1) if feed.batch(1_000_000 + n * 1_000_000)]
    assert len(kept) == 9


@pytest.mark.parametrize(
    ("scheduled", "drafts", "is_chunk", "kinds"),
    [
        ((1, 5, 6), (), (False, True, False), "DECODE PREFILL_CHUNK PREFILL"),
        ((3, 1, 1), (2, 0, 0), (False,) * 3, "SPECULATIVE DECODE DECODE"),
        ((1, 9, 1), (0, 2, 0), (True, False, False), "PREFILL_CHUNK PREFILL DECODE"),
    ],
)
def test_a_batch_names_each_request_and_what_its_tokens_are(scheduled, drafts, is_chunk, kinds):
    feed = StepFeed()
    feed.add(OPEN, plan(1, scheduled, drafts, is_chunk), 0.001, 1, 2.0)
    record, rows = feed.batch(2_000_000)
    assert record.step_id == 1
    assert [row.request_id for row in rows] == ["c", "a", "b"]
    assert [row.num_tokens for row in rows] == list(scheduled)
    assert [row.num_computed_tokens for row in rows] == [8, 16, 24]
    assert [row.kind for row in rows] == [RowKind[name] for name in kinds.split()]


async def steps_until(stub, request, num_steps):
    """The steps of a watch until there are so many; empty messages are heartbeats."""
    steps, call = [], stub.WatchSteps(request)
    async for response in call:
        for worker in response.workers:
            assert worker.worker_id == "w0"
            steps.extend(worker.steps)
        if len(steps) >= num_steps:
            break
    call.cancel()
    return steps


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_watcher_gets_every_step_once_and_their_sums_are_the_plans(depth):
    worker = FakeGpuWorker()
    await worker.start()
    settings = SchedulerSettings(pipeline_depth=depth, max_num_batched_tokens=16)
    async with (
        running_scheduler([worker], settings) as scheduler,
        open_channel(scheduler.address, ChannelConfig()) as channel,
    ):
        await scheduler.ready()
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        async with router_to(scheduler) as router:
            handles = [await router.submit([n] * size, 12) for n, size in ((11, 40), (12, 5))]
            await router.finished(*handles)
            plans = [plan for plan in worker.plans if plan.rows]
            # Half of them, and the others after the last position, as after a lost connection.
            whole = await steps_until(stub, steps_pb2.WatchStepsRequest(history_s=600), len(plans))
            half = len(whole) // 2
            after = steps_pb2.StepPosition(worker_id="w0", position=whole[half - 1].position)
            rest = await steps_until(stub, steps_pb2.WatchStepsRequest(after=[after]), 1)
            batch = await stub.GetStepBatch(
                steps_pb2.GetStepBatchRequest(worker_id="w0", position=whole[0].position)
            )
        assert whole == sorted(whole, key=lambda step: step.position)
        assert rest == whole[half:]
        assert [step.step_id for step in whole] == [plan.step_id for plan in plans]
        for step, sent in zip(whole, plans, strict=True):
            scheduled = unpack_int32(sent.num_scheduled_tokens, "n")
            assert step.num_requests == len(scheduled)
            assert step.prefill_tokens + step.decode_tokens == scheduled.sum()
            assert step.idle_tokens == 16 - scheduled.sum()
            blocks = (step.kv_blocks_held, step.kv_blocks_cached, step.kv_blocks_empty)
            assert sum(blocks) == worker.num_kv_blocks
        assert sum(step.generated_tokens for step in whole) == 24
        assert all(step.duration_s > 0 for step in whole)
        assert [(row.num_tokens, row.kind) for row in batch.rows] == [(whole[0].prefill_tokens, 1)]


async def test_a_request_that_waits_is_listed_with_its_reason():
    worker = FakeGpuWorker()
    await worker.start()
    worker.hold()
    settings = SchedulerSettings(max_num_seqs=1)
    async with (
        running_scheduler([worker], settings) as scheduler,
        open_channel(scheduler.address, ChannelConfig()) as channel,
    ):
        await scheduler.ready()
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        async with router_to(scheduler) as router:
            handles = await router.submit_all([([9] * 20, 4)] * 3, tenant="t")
            waiting = scheduler.pool.waiting
            await until(lambda: {w.reason for w in waiting()} == {"sequence_slots", "behind_head"})
            listed = await stub.ListWaiting(steps_pb2.ListWaitingRequest(limit=1))
            assert listed.num_waiting == 2
            (first,) = listed.requests
            assert (first.reason, first.worker_id, first.num_tokens) == ("sequence_slots", "w0", 20)
            assert (first.tenant, first.num_needed_blocks) == ("t", 0)
            await worker.release()
            await router.finished(*handles)
            listed = await stub.ListWaiting(steps_pb2.ListWaitingRequest(limit=9))
            assert not listed.requests
