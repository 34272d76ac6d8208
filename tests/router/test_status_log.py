"""What the status store says of requests, with a real Valkey behind a whole router."""

import grpc
import grpc.aio
import pytest
import redis.asyncio

from headrace.service.errors import from_rpc_error
from headrace.status.embedded import EmbeddedStore
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore, Update
from headrace.v1 import inference_pb2
from tests.router.fake_scheduler import worker
from tests.router.stack import running_stack


@pytest.fixture
async def store_url():
    async with EmbeddedStore() as server:
        yield server.url
        client = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
        immortal = [key async for key in client.scan_iter() if await client.pttl(key) < 0]
        await client.aclose()
    assert not immortal


async def status(stack, request_id):
    assert await stack.services.status.flush(5.0)
    return await stack.stub.GetStatus(inference_pb2.GetStatusRequest(request_id=request_id))


async def test_a_request_is_queued_then_dispatched_and_its_stream_durable(store_url):
    async with running_stack(store_url=store_url, waiting_allowance=1) as stack:
        stack.scheduler.is_paced = False
        stack.scheduler.set_workers(worker(max_num_seqs=1))
        await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 1)
        calls = [stack.generate(request_id=f"r-{i}", tenant="t") for i in range(3)]
        await stack.until(lambda: stack.router.num_queued == 1)
        states = [(await status(stack, f"r-{i}")).state for i in range(3)]
        assert sorted(states) == ["DISPATCHED", "DISPATCHED", "QUEUED"]
        record = await status(stack, "r-0")
        assert (record.tenant, record.model, record.prompt_tokens) == ("t", "tiny", 1)
        assert record.epoch == 1
        assert record.create_time.seconds > 0
        stack.scheduler.resume()
        for call in calls:
            assert [m async for m in call]
            assert dict(await call.trailing_metadata())["x-headrace-durable"] == "true"


async def test_a_record_that_a_full_store_does_not_take_is_not_called_unknown():
    async with EmbeddedStore() as server, running_stack(store_url=server.url) as stack:
        await stack.until(lambda: stack.store.is_durable)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(stack, "r")
        assert from_rpc_error(caught.value).reason == "UNKNOWN_REQUEST"
        async with redis.asyncio.Redis.from_url(server.url) as client:
            await client.config_set("maxmemory", "1")
        assert await stack.answer(request_id="r", sampling={"max_tokens": 2})
        await stack.until(lambda: not stack.store.is_durable)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.stub.GetStatus(inference_pb2.GetStatusRequest(request_id="r"))
        assert from_rpc_error(caught.value).reason == "STORE_UNAVAILABLE"


async def test_ends_before_a_dispatch_are_the_routers_to_write(store_url):
    async with running_stack(store_url=store_url, max_queued_requests=2) as stack:
        stack.scheduler.is_paced = False
        stack.scheduler.set_workers(worker(max_num_seqs=1))
        await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 1)
        calls = [stack.generate(request_id=f"r-{i}") for i in range(11)]
        await stack.until(lambda: stack.router.num_queued == 2)
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.answer(request_id="one-too-many")
        assert (await status(stack, "one-too-many")).state == "REJECTED"
        aborted, late = [c.request_id for c in stack.router._dispatcher.queue]
        await stack.stub.Abort(inference_pb2.AbortRequest(request_ids=[aborted]))
        assert (await status(stack, aborted)).state == "ABORTED"
        live = stack.router.calls.get(late).request
        stack.router.live._deadlines.remove(live.number)
        stack.router.live._deadlines.push(live.number, stack.router.now(), live)
        stack.router.expire()
        assert (await status(stack, late)).state == "EXPIRED"
        for call in calls:
            call.cancel()


async def test_several_completions_have_one_status(store_url):
    async with running_stack(store_url=store_url) as stack:
        stack.scheduler.is_paced = False
        call = stack.generate(request_id="several", sampling={"n": 3})
        await stack.until(lambda: len(stack.scheduler.live) == 3)
        assert (await status(stack, "several")).state == "DISPATCHED"
        async with StatusStore(store_url, Writer.SCHEDULER) as scheduler:
            for index, last in enumerate([State.STOPPED, State.STOPPED, State.RUNNING]):
                for state in (State.RUNNING, last):
                    await scheduler.apply(
                        Update(
                            request_id=f"several#{index}",
                            state=state,
                            time_unix_s=2e9,
                            completion_tokens=index + 1,
                        )
                    )
        record = await status(stack, "several")
        assert (record.state, record.completion_tokens) == ("RUNNING", 6)
        call.cancel()


async def test_an_unknown_request_has_no_status(store_url):
    async with running_stack(store_url=store_url) as stack:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status(stack, "never")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
