"""Changes of workers through a router: who is asked, what is answered, what is refused."""

import contextlib

import grpc
import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2
from headrace.vocabulary import WorkerState
from router.core.global_queue import GlobalQueue
from router.core.model_queue import ModelQueue
from router.core.policies import make_order
from router.rpc.pool import queued_by_tenant
from tests.router.core.test_model_queue import entry
from tests.router.fake_scheduler import FakeScheduler, worker
from tests.router.stack import running_stack

LOST, DRAINING = common_pb2.WORKER_STATE_LOST, common_pb2.WORKER_STATE_DRAINING


def test_what_waits_is_told_by_tenant_over_all_models():
    queue = GlobalQueue(lambda: ModelQueue(make_order("fair")))
    for key in range(150):
        queue.push(entry(key, tenant=f"t{key}", num_tokens=1000 - key))
    queue.push(entry(150, model="other", tenant="t149", num_tokens=5000))
    loads = queued_by_tenant(queue)
    assert len(loads) == 100
    assert [(one.tenant, one.num_requests, one.num_tokens) for one in loads[:2]] == [
        ("t149", 2, 5851), ("t0", 1, 1000),
    ]  # fmt: skip
    assert (loads[-1].tenant, loads[-1].num_requests) == ("*", 51)
    assert sum(one.num_requests for one in loads) == 151


async def update(stack, worker_id, **changes):
    request = inference_pb2.UpdateWorkerRequest(worker_id=worker_id, **changes)
    return (await stack.stub.UpdateWorker(request, timeout=20)).worker


async def refusal(stack, worker_id, **changes):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await update(stack, worker_id, **changes)
    return from_rpc_error(raised.value)


@pytest.fixture
async def two_schedulers():
    """Both know worker-0, which the second drives; the first has 40 workers of its own."""
    async with contextlib.AsyncExitStack() as opened:
        first = await opened.enter_async_context(FakeScheduler())
        second = await opened.enter_async_context(FakeScheduler())
        own = [worker(worker_id=f"x-{number:02}") for number in range(40)]
        first.set_workers(worker(state=LOST), *own)
        stack = await opened.enter_async_context(running_stack(schedulers=[first, second]))
        await stack.until(lambda: len(stack.router.pool.reports()) == 42)
        yield stack, first, second


async def test_every_scheduler_that_knows_the_worker_is_told_and_its_driver_answers(two_schedulers):
    stack, first, second = two_schedulers
    decode = common_pb2.WORKER_ROLE_DECODE
    shown = await update(stack, "worker-0", drained=True, role=decode)
    assert (shown.state, shown.role) == (DRAINING, decode)
    assert first.workers[0].role == second.workers[0].role == decode
    reports = stack.router.pool.reports
    await stack.until(lambda: WorkerState.DRAINING in {report.state for report in reports()})
    assert await stack.text("hello", sampling={"max_tokens": 3})
    assert {submission.worker_id[:2] for submission in first.submissions} == {"x-"}
    assert second.submissions == []


async def test_a_worker_that_there_is_not_is_refused_with_the_names_of_others(two_schedulers):
    error = await refusal(two_schedulers[0], "y", drained=True)
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKER")
    assert error.message.startswith("worker_id: there is no worker 'y'; there are: worker-0, x-00,")
    assert error.message.endswith("x-28 and 11 more")


@pytest.mark.parametrize(("changes", "field"), [({}, "drained"), ({"role": 9}, "role")])
async def test_a_change_that_says_nothing_known_is_refused(stack, changes, field):
    error = await refusal(stack, "worker-0", **changes)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)
