"""A prefill that says nothing for minutes, while the client (or its gateway) pings."""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest

from headrace.service import serving
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.router.stack import Stack


def pinging_channel(address, ping_s):
    """As gateways do it: pings on a silent stream, and no end to them."""
    return grpc.aio.insecure_channel(
        address,
        options=[
            ("grpc.keepalive_time_ms", int(ping_s * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ],
    )


async def outcome_after(stub, silence_s, *, speak):
    """What became of a call whose answer began only after so long."""
    call = stub.Generate(
        inference_pb2.GenerateRequest(text="hello", sampling={"max_tokens": 2}), timeout=600
    )
    answer = asyncio.ensure_future(call.read())
    done, _ = await asyncio.wait([answer], timeout=silence_s)
    assert not done or answer.exception() is not None
    speak()
    with contextlib.suppress(grpc.aio.AioRpcError):
        await answer
        await Stack.rest(call)
    return await call.code()


@pytest.mark.parametrize(
    ("silence_s", "ping_s"),
    [
        # gRPC pings once a second, at most; by its own defaults the third is one too many.
        pytest.param(8.0, 1.0, id="eight pings"),
        pytest.param(
            360.0, 30.0, id="six minutes", marks=[pytest.mark.slow, pytest.mark.timeout(400)]
        ),
    ],
)
async def test_a_silent_prefill_outlives_its_clients_pings(stack, silence_s, ping_s):
    stack.scheduler.is_paced = False
    async with pinging_channel(stack.address, ping_s) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        code = await outcome_after(stub, silence_s, speak=stack.scheduler.resume)
        assert code is grpc.StatusCode.OK


class Silent(inference_pb2_grpc.InferenceServicer):
    async def Generate(self, request, context):
        await asyncio.Event().wait()
        yield inference_pb2.GenerateResponse()


async def test_with_grpcs_own_defaults_the_same_pings_end_the_call():
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(Silent(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with pinging_channel(f"127.0.0.1:{port}", 1.0) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        code = await outcome_after(stub, 8.0, speak=lambda: None)
        assert code is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


def test_what_every_server_says_of_pings(monkeypatch):
    seen = {}

    def remember(*, options, **_):
        seen.update(options)
        raise InterruptedError

    monkeypatch.setattr(serving.grpc.aio, "server", remember)
    with pytest.raises(InterruptedError):
        serving.GrpcServer(serving.ServingConfig(), [])
    assert seen["grpc.http2.max_ping_strikes"] >= 100
    assert seen["grpc.http2.min_ping_interval_without_data_ms"] <= 500
    assert seen["grpc.keepalive_permit_without_calls"] == 1
