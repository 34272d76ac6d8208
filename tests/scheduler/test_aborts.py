"""Requests that are ended by their ids, whoever's they are."""

import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import FakeRouter, router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]
ABORTED = inference_pb2.AbortOutcome.RESULT_ABORTED
NOT_FOUND = inference_pb2.AbortOutcome.RESULT_NOT_FOUND


@pytest.fixture
async def worker():
    worker = FakeGpuWorker()
    await worker.start()
    yield worker
    await worker.kill()


async def abort(router: FakeRouter, *request_ids: str) -> list[int]:
    response = await router.stub.Abort(inference_pb2.AbortRequest(request_ids=request_ids))
    assert [outcome.request_id for outcome in response.outcomes] == list(request_ids)
    return [outcome.result for outcome in response.outcomes]


def aborts(router: FakeRouter) -> list[str]:
    return [request_id for message in router.messages for request_id in message.aborts]


async def test_requests_of_any_router_and_orphans_are_ended(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "gone") as gone:
            await gone.has_tokens(await gone.submit(PROMPT, 200, request_id="orphan"), 1)
            worker.hold()
        await until(lambda: not scheduler.switchboard._outboxes)
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            kept = await one.submit(PROMPT, 10)
            ended = await one.submit(PROMPT, 100, request_id="x")
            await until(lambda: len(scheduler.switchboard.requests) == 3)
            assert await abort(other, "x", "orphan", "nowhere", "x") == [
                ABORTED,
                ABORTED,
                NOT_FOUND,
                ABORTED,
            ]
            await one.finished(ended)
            assert one.received[ended].finished.reason == common_pb2.FINISH_REASON_ABORTED
            await until(lambda: len(scheduler.switchboard.requests) == 1)
            await worker.release()
            assert await one.finished(kept) == [expected_tokens(PROMPT, 10)]
            # The id is unknown here, and may wait in any router's queue.
            await one.wait_for(lambda: aborts(one) == ["nowhere"])
            await other.wait_for(lambda: aborts(other) == ["nowhere"])


async def test_all_completions_of_a_request_are_ended_here_and_in_the_queues(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            worker.hold()
            ended = [await router.submit(PROMPT, 100, request_id=f"x#{index}") for index in (0, 3)]
            await until(lambda: len(scheduler.switchboard.requests) == 2)
            assert await abort(router, "x") == [ABORTED]
            await router.finished(*ended)
            await router.wait_for(lambda: aborts(router) == ["x"])
            await worker.release()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (inference_pb2.AbortRequest(), "request_ids"),
        (inference_pb2.AbortRequest(request_ids=["a"] * 1001), "request_ids"),
        (inference_pb2.AbortRequest(request_ids=["a", "b c"]), "request_ids[1]"),
        (inference_pb2.AbortRequest(request_ids=["a"], tenant="t"), "tenant"),
    ],
)
async def test_a_wrong_request_is_refused(worker, message, field):
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await router.stub.Abort(message)
        assert from_rpc_error(error.value).field == field
