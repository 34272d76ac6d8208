"""Health over real gRPC, with callers that do not read."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.service.call_limit import CallLimit
from headrace.service.channels import open_channel
from headrace.service.errors import from_rpc_error
from headrace.service.serving import GrpcServer, ServingConfig
from tests.headrace.raw_http2 import RawHttp2
from tests.headrace.waiting import until

NAME = "headrace.v1.Inference"
WATCH = "/grpc.health.v1.Health/Watch"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
async def server():
    server = GrpcServer(ServingConfig(), [NAME])
    server.address = await server.start()
    yield server
    await server.stop(0)


@pytest.fixture
async def stub(server):
    async with open_channel(server.address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def test_checks_and_lists_and_watches(server, stub):
    request = health_pb2.HealthCheckRequest(service=NAME)
    assert (await stub.Check(request)).status == NOT_SERVING
    watch = stub.Watch(request)
    assert (await watch.read()).status == NOT_SERVING
    server.set_serving(True)
    assert (await watch.read()).status == SERVING
    statuses = (await stub.List(health_pb2.HealthListRequest())).statuses
    assert {name: entry.status for name, entry in statuses.items()}[NAME] == SERVING
    watch.cancel()


async def test_a_service_that_is_not_here_is_unknown(stub):
    request = health_pb2.HealthCheckRequest(service="other")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(request)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(request)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    watch.cancel()


async def test_a_watcher_that_never_reads_holds_up_nobody(server, stub):
    with RawHttp2(server.address, window=0) as stalled:
        stalled.call(WATCH)
        await until(lambda: len(server._health.watchers) == 1)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(60):
            assert (await watch.read()).status == NOT_SERVING
            server.set_serving(True)
            assert (await watch.read()).status == SERVING
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == SERVING
            watch.cancel()
            await server.stop(0.1)


async def test_the_oldest_watcher_leaves_when_there_are_too_many(server, stub):
    server._health.watchers = CallLimit(2)
    with RawHttp2(server.address, window=0) as stalled:
        stalled.call(WATCH)
        await until(lambda: len(server._health.watchers) == 1)
        watches = []
        for _ in range(3):
            watches.append(stub.Watch(health_pb2.HealthCheckRequest()))
            await watches[-1].read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watches[0].read()
        assert from_rpc_error(caught.value).reason == "TOO_MANY_CALLS"
        server.set_serving(True)
        assert [(await watch.read()).status for watch in watches[1:]] == [SERVING] * 2
        assert len(server._health.watchers) == 2
        for watch in watches[1:]:
            watch.cancel()
