"""Certificates that are renewed while calls run, and what is said of those that are wrong."""

import asyncio
import contextlib
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme

from headrace.client import HeadraceClient
from headrace.service import watched
from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.config import ConfigError
from headrace.service.errors import ServiceError
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.service.watched import Watched
from headrace.v1 import inference_pb2, inference_pb2_grpc

NAMES = ("localhost", "127.0.0.1")
PAST = datetime.now(UTC) - timedelta(days=1)


@pytest.fixture(autouse=True)
def _checks_files_at_each_look(monkeypatch):
    monkeypatch.setattr(watched, "_CHECK_S", 0.0)


class Pki:
    """Files with certificates of one authority."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.authority = folder, trustme.CA()
        self.write("ca", self.authority)

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        (self.folder / name).write_bytes(data)

    def write(self, name: str, authority: trustme.CA) -> None:
        authority.cert_pem.write_to_path(self[name])

    def issue(self, name: str, *names: str, authority: trustme.CA | None = None, **terms) -> None:
        leaf = (authority or self.authority).issue_cert(*(names or NAMES), **terms)
        leaf.private_key_pem.write_to_path(self[f"{name}.key"])
        self.put(f"{name}.pem", b"".join(blob.bytes() for blob in leaf.cert_chain_pems))

    def serving(self, name: str, client_ca: str = "") -> ServingConfig:
        return ServingConfig(
            tls_cert_file=self[f"{name}.pem"],
            tls_key_file=self[f"{name}.key"],
            tls_client_ca_file=client_ca and self[client_ca],
        )

    def channel(self, name: str = "", ca: str = "ca") -> ChannelConfig:
        pair = {"tls_cert_file": self[f"{name}.pem"], "tls_key_file": self[f"{name}.key"]}
        return ChannelConfig(tls_ca_file=self[ca], **(pair if name else {}))


class Servicer(inference_pb2_grpc.InferenceServicer):
    """Streams a message for each `step`."""

    def __init__(self) -> None:
        self.steps: asyncio.Queue[str] = asyncio.Queue()

    async def ListModels(self, request, context):
        return inference_pb2.ListModelsResponse()

    async def Generate(self, request, context):
        while True:
            yield inference_pb2.GenerateResponse(request_id=await self.steps.get())


@contextlib.asynccontextmanager
async def serving(config):
    server, servicer = GrpcServer(config, []), Servicer()
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    address = await server.start()
    try:
        yield address, servicer
    finally:
        await server.stop(0)


@pytest.fixture
def pki(tmp_path):
    return Pki(tmp_path)


def certificate(address: str) -> bytes:
    """What a new connection is shown."""
    host, _, port = address.rpartition(":")
    return ssl.get_server_certificate((host, int(port)), timeout=20).encode()


async def next_of(call, servicer, text):
    servicer.steps.put_nowait(text)
    async with asyncio.timeout(20):
        return (await call.read()).request_id


async def test_a_renewed_certificate_is_for_new_connections_and_streams_go_on(pki):
    pki.issue("server")
    async with serving(pki.serving("server")) as (address, servicer):
        before = await asyncio.to_thread(certificate, address)
        async with open_channel(address, pki.channel()) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest())
            assert await next_of(call, servicer, "before") == "before"
            pki.issue("server")
            after = await asyncio.to_thread(certificate, address)
            assert after != before
            assert after.strip() in pki.read("server.pem")
            assert await next_of(call, servicer, "after") == "after"
            async with open_channel(address, pki.channel()) as another:
                await inference_pb2_grpc.InferenceStub(another).ListModels(
                    inference_pb2.ListModelsRequest(), timeout=20
                )
            call.cancel()


async def test_half_a_renewal_leaves_the_last_certificate(pki, caplog):
    pki.issue("server")
    async with serving(pki.serving("server")) as (address, _):
        before = await asyncio.to_thread(certificate, address)
        key = pki.read("server.key")
        pki.issue("server")
        renewed = pki.read("server.key")
        pki.put("server.key", key)
        assert await asyncio.to_thread(certificate, address) == before
        pki.put("server.key", renewed)
        assert await asyncio.to_thread(certificate, address) != before
    assert "cannot be used" in caplog.text
    assert "PRIVATE" not in caplog.text


async def test_another_authority_and_client_certificate_count_without_breaking_streams(pki):
    """As a move to a new authority goes: both ends have new files, streams their connections."""
    pki.issue("server")
    pki.issue("client")
    config = pki.serving("server", client_ca="ca")
    async with (
        serving(config) as (address, servicer),
        open_channel(address, pki.channel("client")) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest())
        assert await next_of(call, servicer, "1") == "1"
        other = trustme.CA()
        pki.write("ca", other)
        for name in ("server", "client"):
            pki.issue(name, authority=other)
        for _ in range(2):
            await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)
        assert channel.num_old == 1
        assert await next_of(call, servicer, "2") == "2"
        call.cancel()
        async with asyncio.timeout(20):
            assert await call.code() is grpc.StatusCode.CANCELLED
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)
        assert channel.num_old == 0


async def test_closing_the_channel_ends_the_streams_of_the_old_one(pki):
    pki.issue("server")
    async with serving(pki.serving("server")) as (address, servicer):
        channel = open_channel(address, pki.channel())
        stub = inference_pb2_grpc.InferenceStub(channel)
        call = stub.Generate(inference_pb2.GenerateRequest())
        await next_of(call, servicer, "1")
        pki.write("ca", pki.authority)
        await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=20)
        async with asyncio.timeout(20):
            await channel.close()
            assert await call.code() is grpc.StatusCode.CANCELLED


def cases(pki):
    """How each is served and called, and what the caller is told."""
    pki.issue("good")
    pki.issue("expired", not_before=PAST - timedelta(days=1), not_after=PAST)
    pki.issue("elsewhere", "example.org")
    other = trustme.CA()
    pki.write("other-ca", other)
    pki.issue("stranger", authority=other)
    return {
        "plain text to TLS": (pki.serving("good"), None, "speaks TLS: give tls_ca_file"),
        "TLS to plain text": (ServingConfig(), pki.channel(), "does not speak TLS"),
        "expired": (pki.serving("expired"), pki.channel(), "has expired: renew it"),
        "another name": (pki.serving("elsewhere"), pki.channel(), "is of another name"),
        "another authority": (pki.serving("good"), pki.channel(ca="other-ca"), "not signed by"),
        "no client certificate": (pki.serving("good", "ca"), pki.channel(), "Socket closed"),
        "expired client": (pki.serving("good", "ca"), pki.channel("expired"), "Socket closed"),
        "strange client": (pki.serving("good", "ca"), pki.channel("stranger"), "Socket closed"),
    }


NAMES_OF_CASES = (
    *("plain text to TLS", "TLS to plain text", "expired", "another name", "another authority"),
    *("no client certificate", "expired client", "strange client"),
)


@pytest.mark.parametrize("name", NAMES_OF_CASES)
async def test_what_is_wrong_is_refused_and_said(pki, name):
    served, channel, text = cases(pki)[name]
    async with serving(served) as (address, _), HeadraceClient(address, channel) as client:
        with pytest.raises(ServiceError, match=text) as caught:
            async with asyncio.timeout(20):
                await client.models()
        assert caught.value.reason == "UNREACHABLE"


async def test_a_stream_to_a_port_with_tls_is_refused_at_once(pki):
    pki.issue("server")
    async with serving(pki.serving("server")) as (address, _), HeadraceClient(address) as client:
        with pytest.raises(ServiceError, match="speaks TLS: give tls_ca_file"):
            async with asyncio.timeout(20):
                async for _ in client.generate("hi"):
                    pass


def test_what_cannot_be_read_at_first_is_an_error(tmp_path):
    def read():
        raise ConfigError("no such thing")

    with pytest.raises(ConfigError, match="no such thing"):
        Watched([str(tmp_path / "none")], read)
