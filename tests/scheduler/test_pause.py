"""Requests that a router pauses, wherever they are: running, waiting, or between two workers."""

import json
import time

import pytest

from headrace.v1 import common_pb2, scheduler_pb2
from scheduler.config import SchedulerSettings
from scheduler.replay.replay import first_difference
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until
from tests.scheduler.replay.assembling import assemble

SLOW, QUICK = [11, 12, 13, 14, 15], [21, 22, 23]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def load_of(scheduler):
    """Free blocks, running and waiting requests of the one worker."""
    (load,) = scheduler.pool.snapshot()
    return load.num_free_blocks, load.num_running, load.num_waiting


async def paused_after(router, scheduler, handle, num_tokens):
    """Pause a request that has so many tokens, and wait until it holds nothing."""
    await router.has_tokens(handle, num_tokens)
    await router.pause(handle)
    await until(lambda: any(engine.num_paused for engine in engines(scheduler)))


def engines(scheduler):
    return [worker.engine for worker in scheduler.pool._workers if worker.engine is not None]


@DEPTHS
async def test_a_paused_request_holds_nothing_while_others_go_on(depth, tmp_path):
    worker = FakeGpuWorker()
    await worker.start()
    record = tmp_path / "run.jsonl"
    settings = SchedulerSettings(pipeline_depth=depth, record=str(record))
    async with running_scheduler([worker], settings) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            slow = await router.submit(SLOW, 200)
            await paused_after(router, scheduler, slow, 10)
            quick = await router.submit(QUICK, 100)
            assert await router.finished(quick) == [expected_tokens(QUICK, 100)]
            num_tokens = len(router.received[slow].token_ids)
            await until(lambda: load_of(scheduler) == (worker.num_kv_blocks, 0, 0))
            again = await router.submit(QUICK, 100)
            assert await router.finished(again) == [expected_tokens(QUICK, 100)]
            assert len(router.received[slow].token_ids) == num_tokens
            await router.pause(slow, paused=False)
            assert await router.finished(slow) == [expected_tokens(SLOW, 200)]
            # All but the last token's KV had been computed; in a pipeline perhaps that one's, too.
            meter = scheduler.switchboard.log.meter
            lost = len(SLOW) + num_tokens - 1 - meter.num_tokens_lost_to_pauses
            assert 1 - depth <= lost <= 0
    trace = assemble([json.loads(line) for line in record.read_text().splitlines()])
    assert [action for step in trace["steps"] for action, _ in step.get("client", ())] == [
        "pause",
        "continue",
    ]
    assert first_difference(trace) is None


@DEPTHS
async def test_paused_and_continued_at_any_moment_every_token_comes_once(depth):
    worker = FakeGpuWorker(num_kv_blocks=40)
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            prompts = [[20 + i, 30 + i, 40 + i] for i in range(6)]
            handles = await router.submit_all([(prompt, 60) for prompt in prompts])

            def num_tokens():
                return sum(len(router.received[handle].token_ids) for handle in handles)

            for number in range(90):
                before = num_tokens()
                await router.pause(handles[number % 6], paused=number % 4 < 2)
                await until(lambda: num_tokens() > before or not load_of(scheduler)[1])  # noqa: B023
            await router.pause(*handles, paused=False)
            assert await router.finished(*handles) == [expected_tokens(p, 60) for p in prompts]


@DEPTHS
async def test_what_ends_a_request_ends_a_paused_one(depth):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            cancelled = await router.submit(SLOW, 200)
            await paused_after(router, scheduler, cancelled, 5)
            await router.cancel(cancelled)
            late = await router.submit(SLOW, 200, deadline_unix_s=time.time() + 3600)
            await paused_after(router, scheduler, late, 5)
            scheduler.skipped_s = 7200
            await router.finished(cancelled, late)
            left = await router.submit(SLOW, 200)
            await paused_after(router, scheduler, left, 5)
    reasons = [router.received[handle].finished.reason for handle in (cancelled, late)]
    assert reasons == [common_pb2.FINISH_REASON_ABORTED, common_pb2.FINISH_REASON_DEADLINE]


async def test_a_request_that_was_paused_on_a_lost_worker_stays_so_on_another():
    one, other = FakeGpuWorker("one"), FakeGpuWorker("other")
    await one.start()
    await other.start()
    async with running_scheduler([one, other]) as scheduler:
        await scheduler.ready(2)
        async with router_to(scheduler) as router:
            slow = await router.submit(SLOW, 200, worker_id="one")
            await paused_after(router, scheduler, slow, 5)
            await one.kill()
            await until(lambda: [e.num_paused for e in engines(scheduler)] == [1])
            quick = await router.submit(QUICK, 50)
            assert await router.finished(quick) == [expected_tokens(QUICK, 50)]
            num_tokens = len(router.received[slow].token_ids)
            await router.pause(slow, paused=False)
            assert await router.finished(slow) == [expected_tokens(SLOW, 200)]
    assert num_tokens < 200


@pytest.mark.parametrize("is_paused", [True, False])
async def test_what_was_said_while_no_worker_had_it_counts(is_paused):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            slow = await router.submit(SLOW, 100)
            if not is_paused:
                await paused_after(router, scheduler, slow, 5)
            await router.has_tokens(slow, 5)
            await worker.kill()
            await until(lambda: len(scheduler.pool._stranded) > 0)
            request = next(iter(scheduler.switchboard.requests))
            await router.pause(slow, paused=is_paused)
            await until(lambda: request.is_paused is is_paused)
            await worker.start()
            if is_paused:
                await until(lambda: [e.num_paused for e in engines(scheduler)] == [1])
                await router.pause(slow, paused=False)
            assert await router.finished(slow) == [expected_tokens(SLOW, 100)]


async def test_a_long_prompt_may_be_paused_before_the_core_has_it():
    worker = FakeGpuWorker(
        num_kv_blocks=800, max_model_len=4096, max_num_batched_tokens=1024, max_num_seqs=2
    )
    await worker.start()
    prompt = [10 + i % 900 for i in range(3000)]
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            submission = router.submission(prompt, 5)
            pause = scheduler_pb2.Pause(handle=submission.handle, paused=True)
            await router.send(submissions=[submission], pauses=[pause])
            await until(lambda: [e.num_paused for e in engines(scheduler)] == [1])
            await until(lambda: not engines(scheduler)[0]._inbox.is_hashing)
            assert not worker.plans
            await router.pause(submission.handle, paused=False)
            assert await router.finished(submission.handle) == [expected_tokens(prompt, 5)]


async def test_a_pause_of_a_request_that_has_ended_means_nothing():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            first = await router.submit(QUICK, 3)
            await router.finished(first)
            await router.pause(first, 99)
            await router.pause(first, 99, paused=False)
            second = await router.submit(QUICK, 3)
            assert await router.finished(second) == [expected_tokens(QUICK, 3)]
