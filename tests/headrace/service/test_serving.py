"""A real server on loopback: errors, health, TLS and token, as a caller sees them."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace.service import errors
from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.config import ConfigError
from headrace.service.errors import ServiceError, from_rpc_error
from headrace.service.handlers import write
from headrace.service.serving import GrpcServer, ServingConfig, stop_asked
from headrace.v1 import inference_pb2, inference_pb2_grpc

NAME = "headrace.v1.Inference"


class Servicer(inference_pb2_grpc.InferenceServicer):
    """Raises what the request's model names, else answers."""

    async def ListModels(self, request, context):
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name="m")])

    async def GetStatus(self, request, context):
        match request.request_id:
            case "busy":
                raise errors.exhausted("QUEUE_FULL", "the queue is full", retry_after_s=1.5)
            case "bug":
                raise KeyError("secret")
            case "long":
                raise errors.invalid(
                    "request_id", "\N{SNOWMAN}" * 100_000 + " is too long; shorten it"
                )
        raise errors.invalid("request_id", "must not be empty")

    async def Generate(self, request, context):
        yield inference_pb2.GenerateResponse(request_id="1")
        raise errors.unavailable("LOST", "the worker went away")


class Flood(inference_pb2_grpc.InferenceServicer):
    """Writes until the call is over, and notes how it heard of that."""

    def __init__(self):
        self.ended_by = asyncio.Queue()

    async def Generate(self, request, context):
        try:
            while True:
                await write(context, inference_pb2.GenerateResponse(request_id="1" * 10_000))
        except BaseException as error:
            self.ended_by.put_nowait(type(error))
            raise


@asynccontextmanager
async def serving(servicer=None, **settings) -> AsyncIterator[str]:
    server = GrpcServer(ServingConfig(**settings), [NAME])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer or Servicer(), server.server)
    address = await server.start()
    server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(0)


async def status_error(address: str, request_id: str) -> ServiceError:
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(inference_pb2.GetStatusRequest(request_id=request_id))
    return from_rpc_error(caught.value)


async def test_an_invalid_field_comes_back_with_its_name() -> None:
    async with serving() as address:
        error = await status_error(address, "")
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.reason, error.field) == ("INVALID_FIELD", "request_id")
    assert error.message == "request_id: must not be empty"


async def test_an_overload_says_when_to_come_back() -> None:
    async with serving() as address:
        error = await status_error(address, "busy")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.retry_after_s == pytest.approx(1.5)


async def test_a_bug_becomes_internal_without_its_text(caplog) -> None:
    async with serving() as address:
        error = await status_error(address, "bug")
    assert error.code is grpc.StatusCode.INTERNAL
    assert "secret" not in error.message
    assert "secret" in caplog.text


async def test_a_long_message_still_reaches_the_caller_as_the_error_it_is() -> None:
    async with serving() as address:
        error = await status_error(address, "long")
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "request_id")
    assert error.message.startswith("request_id: \N{SNOWMAN}")
    assert error.message.endswith("\N{SNOWMAN} is too long; shorten it")
    assert len(error.message.encode()) <= 1000


async def test_an_error_in_a_stream_follows_what_was_sent() -> None:
    async with serving() as address, open_channel(address) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
        received = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in call:
                received.append(message.request_id)
    assert received == ["1"]
    assert from_rpc_error(caught.value).reason == "LOST"


async def test_a_message_over_the_limit_is_resource_exhausted() -> None:
    async with serving(max_message_bytes=1000) as address, open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetStatus(inference_pb2.GetStatusRequest(request_id="x" * 2000))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_and_reflection_answer_for_the_service() -> None:
    async with serving() as address, open_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = [s.name async for m in call for s in m.list_services_response.service]
    assert NAME in names


async def test_health_is_not_serving_until_told() -> None:
    server = GrpcServer(ServingConfig(), [NAME])
    address = await server.start()
    try:
        async with open_channel(address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest()
            )
    finally:
        await server.stop(0)
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_call_without_the_token_is_refused_and_health_is_not(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    async with serving(auth_token_file=str(token)) as address:
        assert (await status_error(address, "")).code is grpc.StatusCode.UNAUTHENTICATED
        async with open_channel(address) as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest()
            )
            with pytest.raises(grpc.aio.AioRpcError, match="Bearer"):
                await call.read()
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        async with open_channel(address, ChannelConfig(auth_token_file=str(token))) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert (await stub.ListModels(inference_pb2.ListModelsRequest())).models[0].name == "m"
            first = await stub.Generate(inference_pb2.GenerateRequest()).read()
    assert first.request_id == "1"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """PEM files by what they are for."""
    directory = tmp_path_factory.mktemp("pki")
    authority = trustme.CA()
    paths = {name: str(directory / name) for name in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(paths["ca"])
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(paths["key"])
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(paths["cert"], append=True)
    return paths


async def test_mutual_tls_lets_in_who_shows_a_certificate(certificates: dict[str, str]) -> None:
    server = ServingConfig(
        tls_cert_file=certificates["cert"],
        tls_key_file=certificates["key"],
        tls_client_ca_file=certificates["ca"],
    )
    known = ChannelConfig(
        tls_ca_file=certificates["ca"],
        tls_cert_file=certificates["cert"],
        tls_key_file=certificates["key"],
    )
    request = inference_pb2.ListModelsRequest()
    async with serving(**msgspec.to_builtins(server)) as address:
        async with open_channel(address, known) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert (await stub.ListModels(request)).models[0].name == "m"
        stranger = ChannelConfig(tls_ca_file=certificates["ca"])
        async with open_channel(address, stranger) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.InferenceStub(channel).ListModels(request, timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_socket_needs_no_certificate(certificates: dict[str, str], tmp_path: Path) -> None:
    """As under `headrace serve` with a settings file that protects the ports of all services."""
    server = ServingConfig(
        listen=f"unix:{tmp_path}/s",
        tls_cert_file=certificates["cert"],
        tls_key_file=certificates["key"],
        tls_client_ca_file=certificates["ca"],
    )
    async with serving(**msgspec.to_builtins(server)) as address:
        known = ChannelConfig(tls_ca_file=certificates["ca"])
        async with open_channel(address, known) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            models = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=60)
    assert models.models[0].name == "m"


async def test_a_taken_port_is_a_clear_error() -> None:
    async with serving() as address:
        second = GrpcServer(ServingConfig(listen=address), [NAME])
        with pytest.raises(ConfigError, match=f"cannot listen on {address}"):
            await second.start()
        await second.stop(0)


@pytest.mark.parametrize("listen", ["127.0.0.1:99999", "127.0.0.1", "nonsense", "127.0.0.1:-1", ""])
async def test_a_place_that_nobody_can_listen_on_is_not_a_taken_port(listen: str) -> None:
    server = GrpcServer(ServingConfig(listen=listen), [NAME])
    with pytest.raises(ConfigError, match="listen: must be host:port"):
        await server.start()
    await server.stop(0)


async def test_a_signal_is_waited_for_once() -> None:
    stop = stop_asked()
    signal.raise_signal(signal.SIGTERM)
    await asyncio.wait_for(stop.wait(), 5)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("method", ["Generate", "GetStatus"])
async def test_bytes_that_are_no_message_are_the_callers_fault(method: str) -> None:
    async with serving() as address, open_channel(address) as channel:
        make = channel.unary_stream if method == "Generate" else channel.unary_unary
        call = make(f"/{NAME}/{method}", request_serializer=bytes, response_deserializer=bytes)(
            b"\x0a\x02\xff\xfe", timeout=5
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call.read() if method == "Generate" else call)
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")


@pytest.mark.parametrize("timeout_s", [None, 0.1])
async def test_a_caller_that_does_not_read_and_leaves_is_nobodys_failure(timeout_s, caplog):
    flood = Flood()
    async with serving(flood) as address:
        for _ in range(4):
            async with open_channel(address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                call = stub.Generate(inference_pb2.GenerateRequest(), timeout=timeout_s)
                await call.read()
                if timeout_s is None:
                    call.cancel()
                async with asyncio.timeout(60):
                    assert issubclass(await flood.ended_by.get(), asyncio.CancelledError)
    assert not caplog.records
