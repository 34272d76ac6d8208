"""What operators do with workers while requests run: drain, use again, set the role."""

import grpc
import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2, scheduler_pb2
from headrace.vocabulary import WorkerRole, WorkerState
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPTS = [[20 + i, 30 + i, 40 + i] for i in range(4)]
WORKER_LOST = scheduler_pb2.REFUSAL_REASON_WORKER_LOST


@pytest.fixture
async def one():
    worker = FakeGpuWorker("one")
    worker.hold()
    await worker.start()
    yield worker
    await worker.kill()


@pytest.fixture
async def other():
    worker = FakeGpuWorker("other")
    await worker.start()
    yield worker
    await worker.kill()


def load_of(scheduler, name: str):
    return next(load for load in scheduler.pool.snapshot() if load.info.worker_id == name)


async def update(router, name: str, **changes) -> common_pb2.Worker:
    request = inference_pb2.UpdateWorkerRequest(worker_id=name, **changes)
    return (await router.stub.UpdateWorker(request)).worker


async def test_a_drained_worker_finishes_what_it_has_and_is_used_again_when_undrained(one, other):
    async with running_scheduler([one, other]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready(2)
        engines = scheduler.pool.engines
        running = await router.submit(PROMPTS[0], 20, worker_id="one")
        await one.step_begun(1)
        shown = await update(router, "one", drained=True)
        assert (shown.state, shown.num_running) == (common_pb2.WORKER_STATE_DRAINING, 1)
        named = await router.submit(PROMPTS[1], 5, worker_id="one")
        refusal = await router.refused(named)
        assert (refusal.reason, refusal.message) == (WORKER_LOST, "worker 'one' is drained")
        anywhere = await router.submit(PROMPTS[1], 5)
        assert await router.finished(anywhere) == [expected_tokens(PROMPTS[1], 5)]
        assert router.received[anywhere].admitted.worker_id == "other"
        await one.release()
        assert await router.finished(running) == [expected_tokens(PROMPTS[0], 20)]
        await until(lambda: load_of(scheduler, "one").num_running == 0)
        assert load_of(scheduler, "one").state is WorkerState.DRAINING
        shown = await update(router, "one", drained=False)
        assert shown.state == common_pb2.WORKER_STATE_READY
        again = await router.submit(PROMPTS[2], 5, worker_id="one")
        assert await router.finished(again) == [expected_tokens(PROMPTS[2], 5)]
        assert scheduler.pool.engines == engines, "a worker was lost meanwhile"


async def test_a_lost_request_goes_on_on_a_drained_worker_where_no_other_is(one, other):
    async with running_scheduler([one, other]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready(2)
        running = await router.submit(PROMPTS[0], 20, worker_id="one")
        await one.step_begun(1)
        await update(router, "other", drained=True)
        await one.kill()
        assert await router.finished(running) == [expected_tokens(PROMPTS[0], 20)]


async def test_a_worker_that_is_started_again_keeps_its_role_and_is_not_drained(one):
    async with running_scheduler([one]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        shown = await update(router, "one", drained=True, role=common_pb2.WORKER_ROLE_DECODE)
        assert shown.role == common_pb2.WORKER_ROLE_DECODE
        await one.kill()
        await until(lambda: load_of(scheduler, "one").state is WorkerState.LOST)
        await one.start()
        await scheduler.ready()
        assert load_of(scheduler, "one").info.role is WorkerRole.DECODE
        shown = await update(router, "one", role=common_pb2.WORKER_ROLE_MIXED)
        assert shown.role == common_pb2.WORKER_ROLE_MIXED


async def test_a_worker_that_is_not_here_is_not_found(one):
    async with running_scheduler([one]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await update(router, "two", drained=True)
        error = from_rpc_error(raised.value)
        assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKER")
        assert error.message == "no worker 'two' is here: one"
