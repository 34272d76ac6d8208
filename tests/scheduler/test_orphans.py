"""Requests whose router has gone, until they end or are paused."""

from headrace.v1 import scheduler_pb2
from scheduler.config import PoolSettings
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import RunningScheduler, router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]


async def orphan_after(scheduler: RunningScheduler, num_tokens: int, max_tokens: int = 200) -> None:
    """Let a request "x" become an orphan when it has so many tokens."""
    async with router_to(scheduler, "gone") as router:
        handle = await router.submit(PROMPT, max_tokens, request_id="x")
        await router.has_tokens(handle, num_tokens)
    await until(lambda: not scheduler.switchboard._outboxes)


def num_generated(scheduler: RunningScheduler) -> int:
    (request,) = scheduler.switchboard.requests
    return scheduler.switchboard.requests.num_generated(request)


async def test_an_orphan_goes_on_to_its_end():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        await orphan_after(scheduler, 3)
        await until(lambda: not len(scheduler.switchboard.requests))
    sampled = sum(len(plan.rows) // 4 for plan in worker.plans)
    assert sampled >= 200


async def test_an_orphan_with_too_many_unread_tokens_is_paused_and_holds_nothing():
    worker = FakeGpuWorker(max_model_len=20_000, num_kv_blocks=8_000)
    await worker.start()
    settings = PoolSettings(max_orphan_tokens=5)
    async with running_scheduler([worker], None, settings) as scheduler:
        await scheduler.ready()
        await orphan_after(scheduler, 3, 15_000)
        await until(lambda: num_generated(scheduler) > 8)
        await until(lambda: scheduler.num_free_blocks() == [worker.num_kv_blocks])
        (request,) = scheduler.switchboard.requests
        assert request.is_paused
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 15_000, request_id="x", epoch=2)
            already = num_generated(scheduler)
            await router.has_tokens(handle, already + 5)
            expected = expected_tokens(PROMPT, len(router.received[handle].token_ids))
            assert router.received[handle].token_ids == expected


async def test_an_orphan_that_nobody_resumes_ends():
    worker = FakeGpuWorker()
    await worker.start()
    settings = PoolSettings(orphan_ttl_s=0.1, max_orphan_tokens=1)
    async with running_scheduler([worker], None, settings) as scheduler:
        await scheduler.ready()
        worker.hold()
        async with router_to(scheduler, "gone") as router:
            await router.submit(PROMPT, 200)
            await until(lambda: len(scheduler.switchboard.requests) == 1)
        (request,) = scheduler.switchboard.requests
        await until(lambda: not len(scheduler.switchboard.requests))
        assert request.end_message == "nobody resumed the request for 0.1 s"
        await worker.release()


async def test_what_a_router_cancels_before_it_leaves_ends_at_once():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "tidy") as router:
            handle = await router.submit(PROMPT, 200)
            await router.has_tokens(handle, 1)
            worker.hold()
            await router.send(cancellations=[scheduler_pb2.Cancellation(handle=handle)])
            await router.call.done_writing()
            await router.ended()
            await until(lambda: not len(scheduler.switchboard.requests))
        await worker.release()
