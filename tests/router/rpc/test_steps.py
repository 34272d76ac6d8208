"""What a router says of steps and of the queue: its schedulers' words, merged with its own."""

import asyncio
import contextlib

import pytest

from headrace.client import HeadraceClient
from headrace.service.errors import ServiceError
from headrace.types import TenantLoad
from tests.headrace.time_spent import seconds_by_stage
from tests.router.fake_scheduler import FakeScheduler
from tests.router.stack import running_stack
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import running_scheduler

BODY = {"token_ids": {"ids": range(20, 30)}, "sampling": {"max_tokens": 6, "ignore_eos": True}}


@contextlib.asynccontextmanager
async def two_schedulers(**settings):
    """Real schedulers with a fake gpuworker each, behind one router, and a client of it."""
    async with contextlib.AsyncExitStack() as stack:
        workers, schedulers = [], []
        for name in ("w1", "w2"):
            worker = FakeGpuWorker(name, model="tiny", max_num_seqs=1)
            await worker.start()
            running = running_scheduler([worker], has_company=True)
            scheduler = await stack.enter_async_context(running)
            await scheduler.ready()
            workers.append(worker)
            schedulers.append(scheduler)
        router = await stack.enter_async_context(running_stack(schedulers=schedulers, **settings))
        await router.until(lambda: len(router.router.pool.ready("tiny", router.router.now())) == 2)
        client = await stack.enter_async_context(HeadraceClient(router.address))
        yield router, workers, client


async def test_the_steps_of_all_schedulers_come_in_one_stream_and_go_on_after_a_position():
    async with two_schedulers() as (router, workers, client):
        await asyncio.gather(*(router.answer(request_id=f"r{n}", **BODY) for n in range(6)))
        num_steps = {w.worker_id: sum(bool(p.rows) for p in w.plans) for w in workers}
        assert min(num_steps.values()) > 0
        found = {"w1": [], "w2": []}
        async with contextlib.aclosing(client.watch_steps(history_s=600)) as news:
            async for batch in news:
                for worker in batch:
                    found[worker.worker_id] += worker.steps
                    assert not worker.has_gap
                if {name: len(steps) for name, steps in found.items()} == num_steps:
                    break
        after = {name: steps[0].position for name, steps in found.items()}
        again = {"w1": [], "w2": []}
        async with contextlib.aclosing(client.watch_steps(after=after)) as news:
            while again != {name: steps[1:] for name, steps in found.items()}:
                for worker in await anext(news):
                    again[worker.worker_id] += worker.steps
        last = found["w2"][-1]
        batch = await client.step_batch("w2", last.position)
        assert batch.step == last
        assert [row.kind for row in batch.rows] == ["decode"]
        assert batch.rows[0].request_id in {f"r{n}" for n in range(6)}
        with pytest.raises(ServiceError, match="no scheduler keeps the batch"):
            await client.step_batch("w2", last.position + 1)


async def test_the_queue_lists_what_waits_in_schedulers_and_then_what_waits_here():
    async with two_schedulers(waiting_allowance=1) as (router, workers, client):
        for worker in workers:
            worker.hold()
        calls = []
        for n in range(8):
            # One after the other: the queue is in the order of arrival.
            name, tenant = f"r{n}", "batch" if n < 7 else "chat"
            call = router.answer(request_id=name, tenant=tenant, **BODY)
            calls.append(asyncio.create_task(call))
            await router.until(lambda n=n: router.router.num_live == n + 1)
        page = await client.queue()
        async with asyncio.timeout(60):
            while [r.worker_id for r in page.requests].count("") != 4:
                page = await client.queue()
        assert page.num_waiting == 6
        assert [r.worker_id for r in page.requests] == ["w1", "w2", "", "", "", ""]
        # The only step of each worker began before they came.
        assert {r.reason for r in page.requests[:2]} == {"next_step"}
        here = page.requests[2:]
        # Tenants take turns.
        assert [(r.request_id, r.num_tokens) for r in here] == [(f"r{n}", 10) for n in (4, 7, 5, 6)]
        assert [r.reason for r in here] == ["no_credit"] + ["behind_head"] * 3
        others = TenantLoad(tenant="batch", num_requests=3, num_tokens=30)
        by_tenant = (await client.pool()).queued_by_tenant
        assert by_tenant == (others, TenantLoad(tenant="chat", num_requests=1, num_tokens=10))
        # No scheduler has had the request yet.
        told = await client.explain("r7")
        assert told.queued_with == (others,)
        assert seconds_by_stage(told).keys() == {"TOKENIZE", "QUEUE"}
        assert (await client.queue(offset=1, limit=2)).requests == page.requests[1:3]
        with pytest.raises(ServiceError, match="limit: must be at most 1000"):
            await client.queue(limit=1001)
        for worker in workers:
            await worker.release()
        await asyncio.gather(*calls)
        assert (await client.queue()).num_waiting == 0
        told = await client.explain("r7")
        assert told.queued_with == (others,)
        assert {"TOKENIZE", "QUEUE", "PREFILL", "DECODE"} <= seconds_by_stage(told).keys()


async def test_a_scheduler_that_knows_nothing_of_steps_is_left_out():
    async with running_stack(scheduler=FakeScheduler()) as stack:
        client = HeadraceClient(stack.address)
        async with client, contextlib.aclosing(client.watch_steps()) as news:
            assert await anext(news) == []
            assert (await client.queue()).requests == ()
