"""The scheduler's metrics: what is counted adds up to the steps that the workers ran."""

import pytest

from headrace.service.columns import unpack_int32
from headrace.service.metrics import Distribution
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from scheduler import metrics
from scheduler.config import SchedulerSettings
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import router_to, running_scheduler, until


def read(scheduler):
    """All values by metric and labels; of a histogram its count."""
    store = StatusStore("", Writer.SCHEDULER)
    readings = metrics.read(scheduler.pool, scheduler.switchboard.log, store)
    return {
        (metric, labels): value.count if isinstance(value, Distribution) else value
        for metric, points in readings
        for labels, value in points.items()
    }


def total(found, metric, *labels):
    return sum(v for (m, key), v in found.items() if m is metric and set(labels) <= set(key))


@pytest.mark.parametrize("depth", [1, 2])
async def test_each_step_spends_its_budget_and_each_token_is_counted(depth):
    worker = FakeGpuWorker()
    await worker.start()
    settings = SchedulerSettings(pipeline_depth=depth, max_num_batched_tokens=16)
    async with running_scheduler([worker], settings) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            prompts = [[11] * 40, [12] * 5, [13] * 30]
            handles = [await router.submit(prompt, 12) for prompt in prompts]
            for handle in handles:
                await router.finished(handle)
            found = read(scheduler)
        plans = [plan for plan in worker.plans if plan.rows]
        assert total(found, metrics.STEP_DURATION) == len(plans)
        assert total(found, metrics.STEP_TOKENS) == 16 * len(plans)
        num_scheduled = sum(unpack_int32(p.num_scheduled_tokens, "n").sum() for p in plans)
        uses = [total(found, metrics.STEP_TOKENS, use) for use in ("prefill", "decode")]
        assert sum(uses) == num_scheduled
        assert min(uses) > 0
        assert total(found, metrics.STEP_TOKENS, "speculative") == 0
        assert 0 < total(found, metrics.STEP_GAP) < len(plans) or depth == 2
        assert total(found, metrics.GENERATED_TOKENS) == 36
        assert total(found, metrics.QUERIED_TOKENS) == sum(map(len, prompts))
        assert total(found, metrics.FINISHED, "LENGTH_CAPPED") == 3
        assert total(found, metrics.RUNNING) == total(found, metrics.WAITING) == 0


async def test_blocks_rows_and_waits_are_those_of_now():
    worker = FakeGpuWorker()
    await worker.start()
    worker.hold()
    settings = SchedulerSettings(max_num_seqs=1)
    async with running_scheduler([worker], settings) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handles = [await router.submit([10 + number] * 20, 4) for number in range(3)]
            await until(lambda: total(read(scheduler), metrics.WAITING) == 2)
            found = read(scheduler)
            assert total(found, metrics.RUNNING) == 1
            assert total(found, metrics.KV_BLOCKS, "requests") >= 2
            assert total(found, metrics.WORKERS, "ready") == 1
            await worker.release()
            for handle in handles:
                await router.finished(handle)
            found = read(scheduler)
            assert total(found, metrics.KV_BLOCKS, "requests") == 0
            assert total(found, metrics.KV_BLOCKS, "prefix_cache") >= 3
            assert total(found, metrics.WAITING, "sequence_slots") == 0
