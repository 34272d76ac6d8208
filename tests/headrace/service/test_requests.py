"""When a request is read and decoded, and when it is not; over real gRPC."""

import asyncio
import gc
import tracemalloc
from contextlib import asynccontextmanager

import grpc
import pytest

from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.errors import ServiceError, from_rpc_error
from headrace.service.message_size import MAX_FIELDS
from headrace.service.requests import LargeRequests, release_request
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.v1 import (
    gpuworker_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    scheduler_pb2_grpc,
)
from tests.headrace.raw_http2 import DATA, HEADERS, RawHttp2

METHODS = (
    "/headrace.v1.Inference/Generate",
    "/headrace.v1.Inference/GetStatus",
    "/headrace.v1.Inference/Nothing",
    "/headrace.v1.Scheduler/Connect",
    "/headrace.v1.Scheduler/WatchPool",
    "/headrace.v1.GpuWorker/Describe",
    "/headrace.v1.GpuWorker/Execute",
    "/headrace.v1.GpuWorker/TransferBlocks",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/nobody.knows/This",
)
CHECK = "/grpc.health.v1.Health/Check"


class Panic(BaseException):
    """As a library in Rust raises it."""


class Servicer(inference_pb2_grpc.InferenceServicer):
    """Raises Panic where the request says so."""

    async def GetStatus(self, request, context):
        if request.request_id == "panic":
            raise Panic
        if request.request_id == "cancelled":
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        return "not a message" if request.request_id == "wrong" else self._status

    async def Generate(self, request, context):
        yield inference_pb2.GenerateResponse(request_id="1")
        if request.request_id == "wrong":
            yield "not a message"
        raise Panic

    _status = inference_pb2.GetStatusResponse(request_id="1")


@asynccontextmanager
async def serving(token=None, servicer=None):
    config = ServingConfig(auth_token_file=str(token or ""))
    server = GrpcServer(config, ["headrace.v1.Inference"])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer or Servicer(), server.server)
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(
        scheduler_pb2_grpc.SchedulerServicer(), server.server
    )
    gpuworker_pb2_grpc.add_GpuWorkerServicer_to_server(
        gpuworker_pb2_grpc.GpuWorkerServicer(), server.server
    )
    address = await server.start()
    try:
        yield server, address
    finally:
        await server.stop(0)


@pytest.fixture
def token(tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret")
    return file


async def error_of(address, method, data=b"", config=None) -> ServiceError:
    """What a call ends with, whatever its method is."""
    async with open_channel(address, config) as channel:
        call = channel.unary_stream(method, request_serializer=bytes, response_deserializer=bytes)(
            data, timeout=60
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    return from_rpc_error(caught.value)


@pytest.mark.parametrize("method", METHODS)
async def test_without_the_token_a_call_is_refused_before_its_request_is_sent(token, method):
    async with serving(token) as (_, address):
        assert (await error_of(address, method)).reason == "BAD_TOKEN"
        with RawHttp2(address) as caller:
            stream = caller.headers(method)
            await asyncio.to_thread(caller.until, HEADERS, stream)


@pytest.mark.parametrize("sent", ["Bearer s3cre", "Bearer s3cret2", "s3cret", "bearer s3cret", ""])
async def test_only_the_whole_token_counts(token, sent):
    async with serving(token) as (_, address), open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(
                inference_pb2.GetStatusRequest(), metadata=(("authorization", sent),)
            )
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("method", ["Generate", "GetStatus"])
async def test_a_request_of_too_many_fields_is_refused(token, method):
    config = ChannelConfig(auth_token_file=str(token))
    async with serving(token) as (_, address):
        method = f"/headrace.v1.Inference/{method}"
        error = await error_of(address, method, b"\xa2\x06\x00" * (MAX_FIELDS + 1), config)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOO_MANY_FIELDS")


async def test_reflection_is_bounded_too():
    async with serving() as (_, address):
        error = await error_of(address, METHODS[-2], b"\x2a\x00" * (MAX_FIELDS + 1))
    assert error.reason == "TOO_MANY_FIELDS"


async def test_a_call_without_a_request_is_malformed():
    async with serving() as (_, address), open_channel(address) as channel:
        method = channel.stream_unary(METHODS[1])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(iter(()), timeout=60)
    assert from_rpc_error(caught.value).reason == "MALFORMED_MESSAGE"


async def test_a_health_check_is_small():
    async with serving() as (_, address):
        assert (
            await error_of(address, CHECK, b"\x0a\xff\x7f" + b"x" * 16_383)
        ).reason == "TOO_LARGE"


async def test_health_checks_that_never_arrive_make_room_for_others(monkeypatch):
    monkeypatch.setattr("headrace.service.requests._MAX_HEALTH_READS", 2)
    async with serving() as (_, address), open_channel(address) as channel:
        with RawHttp2(address) as stalled:
            streams = [stalled.headers(CHECK) for _ in range(3)]
            for stream in streams:
                stalled.message(stream, b"", num_bytes=1_000)
            await asyncio.to_thread(stalled.until, HEADERS, streams[0])
            check = channel.unary_unary(CHECK)
            await check(b"", timeout=60)


@pytest.mark.parametrize("request_id", ["panic", "wrong", "cancelled"])
@pytest.mark.parametrize("method", ["Generate", "GetStatus"])
async def test_whatever_a_handler_raises_ends_the_call(method, request_id, caplog):
    request = inference_pb2.GetStatusRequest(request_id=request_id).SerializeToString()
    async with serving() as (_, address):
        error = await error_of(address, f"/headrace.v1.Inference/{method}", request)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
    assert f"{method} failed" in caplog.text


async def test_what_decoding_raises_ends_the_call(monkeypatch, caplog):
    def panic(*_):
        raise Panic

    monkeypatch.setattr("headrace.service.requests.too_many_fields", panic)
    async with serving() as (_, address):
        error = await error_of(address, METHODS[0])
    assert error.reason == "INTERNAL"
    assert "Panic" in caplog.text


async def test_a_request_that_its_handler_has_dropped_is_nowhere():
    has_dropped, goes_on = asyncio.Event(), asyncio.Event()

    class Dropping(Servicer):
        async def Generate(self, request, context):
            del request
            release_request()
            has_dropped.set()
            await goes_on.wait()
            yield inference_pb2.GenerateResponse()

    # In frames of the same bytes, so that nothing here holds 60 kB in one piece.
    frames = [b"\x1a\x80\xe0\x03", *[b"a" * 15_360] * 4]
    tracemalloc.start()
    try:
        async with serving(servicer=Dropping()) as (_, address):
            with RawHttp2(address) as caller:
                stream = caller.headers(METHODS[0])
                caller.message(stream, frames[0], num_bytes=61_444)
                for frame in frames[1:]:
                    caller.send(DATA, 0, stream, frame)
                await has_dropped.wait()
                gc.collect()
                sizes = [trace.size for trace in tracemalloc.take_snapshot().traces]
            goes_on.set()
    finally:
        tracemalloc.stop()
    assert max(sizes) < 60_000


class Turns:
    """Tasks that hold large requests until they are told to go on."""

    def __init__(self, large):
        self._large = large
        self.entered = []
        self._gates = {}
        self.tasks = {}

    async def begin(self, name, num_bytes):
        self._gates[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(name, num_bytes))
        await asyncio.sleep(0)

    async def _run(self, name, num_bytes):
        await self._large.enter(num_bytes)
        self.entered.append(name)
        await self._gates[name].wait()
        release_request()
        release_request()

    async def end(self, name):
        self._gates[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)


MB = 1_000_000


async def test_large_requests_wait_in_their_order():
    large = LargeRequests(3 * MB, 10 * MB)
    turns = Turns(large)
    for name, size in {"a": 2 * MB, "b": 2 * MB, "c": MB, "d": MB}.items():
        await turns.begin(name, size)
    assert turns.entered == ["a"]
    await turns.end("a")
    assert turns.entered == ["a", "b", "c"]
    await turns.end("b")
    assert turns.entered[-1] == "d"
    for name in ("c", "d"):
        await turns.end(name)
    assert (large.num_bytes, large.num_waiting_bytes) == (0, 0)


async def test_one_that_is_larger_than_all_may_hold_goes_alone():
    turns = Turns(LargeRequests(MB, 10 * MB))
    await turns.begin("a", 2 * MB)
    await turns.begin("b", MB)
    assert turns.entered == ["a"]
    await turns.end("a")
    await turns.end("b")


async def test_when_too_much_waits_a_large_request_is_refused():
    turns = Turns(LargeRequests(MB, 2 * MB))
    for name in ("a", "b", "c"):
        await turns.begin(name, MB)
    await turns.begin("d", MB)
    with pytest.raises(ServiceError) as caught:
        await turns.tasks["d"]
    assert (caught.value.reason, caught.value.retry_after_s) == ("TOO_MANY_REQUESTS", 1.0)
    for name in ("a", "b", "c"):
        await turns.end(name)


@pytest.mark.parametrize("when", ["it waits", "its turn has come", "its turn comes"])
async def test_a_caller_that_leaves_gives_its_turn_back(when):
    large = LargeRequests(MB, 10 * MB)
    turns = Turns(large)
    for name in ("a", "b", "c"):
        await turns.begin(name, MB)
    # In one round of the loop, but where it just waits.
    if when != "it waits":
        turns._gates["a"].set()
    if when == "its turn has come":
        await asyncio.sleep(0)
    turns.tasks["b"].cancel()
    with pytest.raises(asyncio.CancelledError):
        await turns.tasks["b"]
    await turns.end("a")
    assert turns.entered[-1] == "c"
    await turns.end("c")
    assert (large.num_bytes, large.num_waiting_bytes) == (0, 0)
