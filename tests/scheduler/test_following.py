"""A scheduler whose workers come and go."""

import asyncio
from contextlib import asynccontextmanager

from headrace.service.channels import ChannelConfig
from headrace.v1 import scheduler_pb2
from headrace.vocabulary import WorkerState
from scheduler.following import AllWorkers
from scheduler.rpc.gpuworker_client import GpuWorkerClient
from tests.headrace.changing_peers import ChangingPeers
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]


@asynccontextmanager
async def following(*workers: FakeGpuWorker):
    """A scheduler that follows a set of workers, of which the first is there."""
    for worker in workers:
        await worker.start()
    peers = ChangingPeers([workers[0].address])

    def connect(address: str) -> GpuWorkerClient:
        return GpuWorkerClient(address, ChannelConfig(), term=1)

    async with running_scheduler([]) as scheduler:
        task = asyncio.create_task(AllWorkers(peers, scheduler.pool, connect).run())
        try:
            async with router_to(scheduler) as router:
                await scheduler.ready(1)
                yield scheduler, router, peers
        finally:
            task.cancel()
            await asyncio.wait([task])
            for worker in workers:
                await worker.kill()


async def test_a_worker_that_comes_gets_requests():
    old, new = FakeGpuWorker("w0"), FakeGpuWorker("w1")
    async with following(old, new) as (scheduler, router, peers):
        peers.set([old.address, new.address])
        await scheduler.ready(2)
        handle = await router.submit(PROMPT, 5, worker_id="w1")
        assert await router.finished(handle) == [expected_tokens(PROMPT, 5)]


async def test_a_worker_that_leaves_finishes_what_it_has_and_gets_nothing_new():
    old, new = FakeGpuWorker("w0"), FakeGpuWorker("w1")
    old.hold()
    async with following(old, new) as (scheduler, router, peers):
        first = await router.submit(PROMPT, 20)
        await old.release(3)
        await router.wait_for(lambda: router.received[first].token_ids)
        peers.set([new.address], leaving=[old.address])
        await until(lambda: scheduler.ready_workers() == ["w1"])
        states = {load.info.worker_id: load.state for load in scheduler.pool.snapshot()}
        assert states["w0"] is WorkerState.DRAINING
        second = await router.submit(PROMPT, 5)
        assert await router.finished(second) == [expected_tokens(PROMPT, 5)]
        await old.release()
        assert await router.finished(first) == [expected_tokens(PROMPT, 20)]
        await until(lambda: scheduler.pool.num_workers == 1)


async def test_requests_of_a_worker_that_goes_return_to_their_routers():
    worker = FakeGpuWorker("w0")
    worker.hold()
    async with following(worker) as (scheduler, router, peers):
        handle = await router.submit(PROMPT, 20)
        await worker.release(3)
        await router.wait_for(lambda: router.received[handle].token_ids)
        peers.set([])
        await until(lambda: not scheduler.ready_workers())
        await worker.kill()
        refusal = await router.refused(handle)
        assert refusal.reason == scheduler_pb2.REFUSAL_REASON_WORKER_LOST
        assert scheduler.pool.num_workers == 0
