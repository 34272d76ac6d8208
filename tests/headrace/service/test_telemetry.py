"""Spans over the real OTLP wire, through real gRPC calls."""

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from headrace.service import telemetry
from headrace.service.config import ConfigError
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.headrace.otlp_receiver import OtlpReceiver

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALLER_TRACE = CALLER.split("-")[1]
CALLER_SPAN = CALLER.split("-")[2]
GENERATE = "headrace.v1.Inference/Generate"


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    receiver = OtlpReceiver()
    yield receiver
    receiver.stop()


@pytest.fixture
def traced(receiver):
    telemetry_ = telemetry.setup("test-service", receiver.endpoint)
    yield telemetry_
    telemetry_.shutdown()


class Servicer(inference_pb2_grpc.InferenceServicer):
    """Streams two deltas, then does what the request's model says."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def Generate(self, request, context):
        self.seen.append(telemetry.current_traceparent())
        yield inference_pb2.GenerateResponse(request_id="a")
        if request.model == "abort":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no")
        if request.model == "crash":
            raise RuntimeError("bug")
        if request.model == "hang":
            await asyncio.Event().wait()
        yield inference_pb2.GenerateResponse(request_id="b")

    async def Abort(self, request, context):
        self.seen.append(telemetry.current_traceparent())
        return inference_pb2.AbortResponse()


@asynccontextmanager
async def serving(telemetry_):
    server = GrpcServer(ServingConfig(), [], telemetry_.server_interceptors)
    servicer = Servicer()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    address = await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            yield inference_pb2_grpc.InferenceStub(channel), servicer
    finally:
        await server.stop(0)


async def generate(stub, model="", metadata=(("traceparent", CALLER),), timeout_s=None):
    request = inference_pb2.GenerateRequest(model=model)
    return [
        r.request_id async for r in stub.Generate(request, metadata=metadata, timeout=timeout_s)
    ]


def rpc_span(receiver, name=GENERATE):
    return next(s for s in receiver.wait(1) if s.name == name)


async def test_a_stream_continues_the_callers_trace(receiver, traced):
    async with serving(traced) as (stub, servicer):
        assert await generate(stub) == ["a", "b"]
    span = await asyncio.to_thread(rpc_span, receiver)
    assert (span.trace_id, span.parent_id) == (CALLER_TRACE, CALLER_SPAN)
    assert span.service == "test-service"
    assert span.attributes["rpc.method"] == GENERATE
    assert span.attributes["rpc.response.status_code"] == "OK"
    assert servicer.seen == [f"00-{span.trace_id}-{span.span_id}-01"]


async def test_a_unary_call_continues_the_callers_trace(receiver, traced):
    async with serving(traced) as (stub, servicer):
        await stub.Abort(inference_pb2.AbortRequest(), metadata=(("traceparent", CALLER),))
    span = await asyncio.to_thread(rpc_span, receiver, "headrace.v1.Inference/Abort")
    assert span.parent_id == CALLER_SPAN
    assert servicer.seen == [f"00-{span.trace_id}-{span.span_id}-01"]


async def test_a_call_without_a_callers_trace_gets_no_span(receiver, traced):
    async with serving(traced) as (stub, servicer):
        await generate(stub, metadata=())
        await stub.Abort(inference_pb2.AbortRequest())
        await stub.Abort(inference_pb2.AbortRequest(), metadata=(("traceparent", CALLER),))
    assert len(await asyncio.to_thread(receiver.wait, 1)) == 1
    assert servicer.seen[:2] == ["", ""]


async def test_a_stream_that_the_client_cancels_is_reported_as_cancelled(receiver, traced):
    async with serving(traced) as (stub, _):
        request = inference_pb2.GenerateRequest(model="hang")
        call = stub.Generate(request, metadata=(("traceparent", CALLER),))
        await call.read()
        call.cancel()
        span = await asyncio.to_thread(rpc_span, receiver)
    assert span.attributes["rpc.response.status_code"] == "CANCELLED"
    assert span.status == 0


async def test_a_stream_whose_time_is_up_is_reported_as_late(receiver, traced):
    async with serving(traced) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(stub, "hang", timeout_s=0.2)
        span = await asyncio.to_thread(rpc_span, receiver)
    assert span.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert span.status == 2


@pytest.mark.parametrize(
    ("model", "code", "status"), [("abort", "INVALID_ARGUMENT", 0), ("crash", "INTERNAL", 2)]
)
async def test_the_callers_fault_is_not_the_servers(receiver, traced, model, code, status):
    async with serving(traced) as (stub, _):
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await generate(stub, model)
        span = await asyncio.to_thread(rpc_span, receiver)
    assert raised.value.code().name == code
    assert span.attributes["rpc.response.status_code"] == code
    assert span.attributes["error.type"] == code
    assert span.status == status


def test_one_trace_id_from_hop_to_hop(receiver, traced):
    with telemetry.start_span("chat m", attributes={telemetry.REQUEST_MODEL: "m"}):
        handed_on = telemetry.current_traceparent()
    request = telemetry.begin_span("scheduler request", handed_on)
    step = telemetry.begin_span("step", telemetry.traceparent_of(request), links=[CALLER, "bad"])
    step.end()
    request.end()
    traced.shutdown()
    by_name = {s.name: s for s in receiver.wait(3)}
    assert len({s.trace_id for s in by_name.values()}) == 1
    assert by_name["step"].parent_id == by_name["scheduler request"].span_id
    assert by_name["scheduler request"].parent_id == by_name["chat m"].span_id
    assert by_name["step"].links == (CALLER_SPAN,)
    assert by_name["chat m"].attributes == {"gen_ai.request.model": "m"}


def test_a_nested_span_has_the_outer_one_as_parent(receiver, traced):
    with telemetry.start_span("outer"), telemetry.start_span("inner"):
        pass
    traced.shutdown()
    by_name = {s.name: s for s in receiver.wait(2)}
    assert by_name["inner"].parent_id == by_name["outer"].span_id


def test_an_exception_marks_the_span_as_failed(receiver, traced):
    with pytest.raises(KeyError), telemetry.start_span("work"):
        raise KeyError("x")
    traced.shutdown()
    (span,) = receiver.wait(1)
    assert (span.status, span.attributes["error.type"]) == (2, "KeyError")


def test_without_an_endpoint_nothing_is_made_but_context_is_passed_on(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    off = telemetry.setup("test-service", "")
    assert off.provider is None
    assert not off.server_interceptors
    with telemetry.start_span("outer", CALLER):
        assert telemetry.current_traceparent() == CALLER
        assert telemetry.outgoing_metadata() == (("traceparent", CALLER),)
    with telemetry.start_span("outer"):
        assert not telemetry.current_traceparent()
        assert telemetry.outgoing_metadata() == ()
    off.shutdown()


@pytest.mark.parametrize("sampler", ["always_on", "traceidratio", "always_off"])
def test_a_service_keeps_to_the_callers_choice_whatever_its_sampler(receiver, monkeypatch, sampler):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    exporting = telemetry.setup("test-service", receiver.endpoint)
    unsampled = CALLER.removesuffix("1") + "0"
    with telemetry.start_span("outer", unsampled):
        assert telemetry.current_traceparent() == unsampled
        with telemetry.start_span("inner") as inner:
            assert not inner.is_recording()
    with telemetry.start_span("kept", CALLER):
        pass
    exporting.shutdown()
    assert [span.name for span in receiver.wait(1)] == ["kept"]


@pytest.mark.parametrize("is_exporting", [True, False])
def test_a_span_of_the_application_is_not_ended(receiver, is_exporting):
    exporting = telemetry.setup("test-service", receiver.endpoint if is_exporting else "")
    application = TracerProvider().get_tracer("application")
    with application.start_as_current_span("app") as span:
        with telemetry.start_span("call"):
            trace_id = telemetry.current_traceparent().split("-")[1]
        assert span.is_recording()
        assert not span.attributes
        assert trace_id == f"{span.get_span_context().trace_id:032x}"
    exporting.shutdown()


def test_the_endpoint_may_come_from_the_environment(receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
    on = telemetry.setup("test-service")
    with telemetry.start_span("work"):
        pass
    on.shutdown()
    assert [s.name for s in receiver.wait(1)] == ["work"]


def test_an_endpoint_without_a_scheme_is_refused():
    with pytest.raises(ConfigError, match="must begin with http"):
        telemetry.setup("test-service", "localhost:4317")


def test_a_collector_that_is_not_there_does_not_hold_up_the_end():
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        on = telemetry.setup("test-service", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        with telemetry.start_span("work"):
            pass
        begin = time.monotonic()
        on.shutdown()
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "x",
        "00-" + "0" * 32 + "-b7ad6b7169203331-01",
        "ff" + CALLER[2:],
        CALLER + "-more",
        CALLER.upper(),
        "00-0af7651916cd43dd8448eb211c80319c-" + "0" * 16 + "-01",
    ],
)
def test_a_malformed_traceparent_is_ignored(bad):
    assert telemetry.parse_traceparent(bad) is None


def test_a_later_version_of_traceparent_is_understood():
    span = telemetry.parse_traceparent("01" + CALLER[2:] + "-more")
    assert span is not None
    assert telemetry.traceparent_of(span) == CALLER
