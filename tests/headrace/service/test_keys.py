"""Keys and tokens at a port: who is let in, and what a change of their files does."""

import asyncio
from datetime import UTC, datetime, timedelta

import grpc.aio
import pytest

from headrace.service import watched
from headrace.service.call_metrics import REFUSED
from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.config import ConfigError
from headrace.service.errors import from_rpc_error
from headrace.service.keys import make_key, parse_keys, section
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.v1 import inference_pb2, inference_pb2_grpc

TENANT_METHODS = ("/headrace.v1.Inference/GetStatus",)


class Servicer(inference_pb2_grpc.InferenceServicer):
    async def GetStatus(self, request, context):
        return inference_pb2.GetStatusResponse(request_id=request.request_id)

    async def GetPool(self, request, context):
        return inference_pb2.GetPoolResponse()


class Port:
    """A server whose callers need keys, and the files that it reads."""

    def __init__(self, folder):
        self.keys_file, self.token_file = folder / "keys.toml", folder / "token"
        self.token_file.write_text("the-token\n")
        self.keys = {}
        self.keys_file.write_text("")

    def add(self, key_id, tenant="", expires=None):
        self.keys[key_id] = make_key()
        with self.keys_file.open("a") as file:
            file.write(section(key_id, self.keys[key_id], tenant, expires))

    async def serve(self):
        config = ServingConfig(
            auth_token_file=str(self.token_file), api_keys_file=str(self.keys_file)
        )
        self.server = GrpcServer(config, [], tenant_methods=TENANT_METHODS)
        inference_pb2_grpc.add_InferenceServicer_to_server(Servicer(), self.server.server)
        self.address = await self.server.start()

    async def answer(self, *secrets, method="GetStatus"):
        """ "" for an answer, else the reason of the refusal; each secret is a line of metadata."""
        async with open_channel(self.address) as channel, asyncio.timeout(20):
            stub = inference_pb2_grpc.InferenceStub(channel)
            request = getattr(inference_pb2, f"{method}Request")()
            metadata = tuple(("authorization", f"Bearer {secret}") for secret in secrets)
            try:
                await getattr(stub, method)(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return from_rpc_error(error).reason
        return ""

    async def until(self, expected, *secrets):
        async with asyncio.timeout(20):
            while await self.answer(*secrets) != expected:  # noqa: ASYNC110 a file has no event
                await asyncio.sleep(0.01)


@pytest.fixture
async def port(tmp_path, monkeypatch):
    monkeypatch.setattr(watched, "_CHECK_S", 0.0)
    made = Port(tmp_path)
    for key_id, tenant in (("acme.1", "acme"), ("root", "")):
        made.add(key_id, tenant)
    now = datetime.now(UTC)
    made.add("old", "acme", now - timedelta(seconds=1))
    made.add("lasting", "acme", now + timedelta(hours=1))
    await made.serve()
    yield made
    await made.server.stop(0)


async def test_each_key_may_do_what_its_section_says(port):
    assert [await port.answer(port.keys[k]) for k in ("acme.1", "root", "lasting")] == [""] * 3
    assert await port.answer("the-token", method="GetPool") == ""
    assert await port.answer(port.keys["root"], method="GetPool") == ""
    assert await port.answer(port.keys["acme.1"], method="GetPool") == "ADMIN_ONLY"
    assert await port.answer(port.keys["old"]) == "EXPIRED_KEY"
    (reading,) = port.server.meter.read()
    assert reading == (REFUSED, {("ADMIN_ONLY",): 1, ("EXPIRED_KEY",): 1})


async def test_no_key_a_wrong_one_a_hash_and_two_are_refused(port):
    key = port.keys["acme.1"]
    digest = parse_keys(port.keys_file.read_text(), "")["acme.1"].sha256
    attempts = [(), (key[:-1],), (key + "x",), (digest,), ("",), (key, key), (key, "the-token")]
    assert [await port.answer(*attempt) for attempt in attempts] == ["BAD_TOKEN"] * len(attempts)


async def test_a_revoked_key_counts_no_more_and_a_new_one_at_once(port):
    port.keys_file.write_text("")
    await port.until("BAD_TOKEN", port.keys["acme.1"])
    port.add("acme.2", "acme")
    await port.until("", port.keys["acme.2"])


async def test_files_that_are_wrong_leave_the_last_good_keys(port, caplog):
    port.keys_file.write_text("[keys.a]\nsha256 = 'x'\n")
    assert [await port.answer(port.keys["acme.1"]) for _ in range(3)] == [""] * 3
    port.token_file.unlink()
    assert await port.answer("the-token") == ""
    complaints = [r for r in caplog.records if "cannot be used" in r.message]
    assert len(complaints) == 2
    assert not any(secret in caplog.text for secret in ("the-token", *port.keys.values()))


async def test_a_token_is_rotated_by_serving_both_and_then_sending_the_other(port, tmp_path):
    sent = tmp_path / "sent"
    sent.write_text("the-token\nignored\n")
    async with (
        open_channel(port.address, ChannelConfig(auth_token_file=str(sent))) as channel,
        asyncio.timeout(20),
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.GetPool(inference_pb2.GetPoolRequest())
        port.token_file.write_text("the-token\nanother\n")
        await port.until("", "another")
        await stub.GetPool(inference_pb2.GetPoolRequest())
        sent.write_text("another\n")
        port.token_file.write_text("another\n")
        await port.until("BAD_TOKEN", "the-token")
        await stub.GetPool(inference_pb2.GetPoolRequest())


HASH = f'sha256 = "{"0" * 64}"\n'


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[keys.a]\n" + HASH, "give either tenant or admin"),
        (f"[keys.a]\n{HASH}tenant = 'a'\nadmin = true\n", "give either tenant or admin"),
        ("[keys.a]\nsha256 = 'secret'\nadmin = true\n", "sha256 must be 64 digits"),
        (f"[keys.a]\n{HASH}tenant = 'a/b'\n", "tenant must be 1 to 64 characters"),
        (f"[keys.'a b']\n{HASH}admin = true\n", "an id must be"),
        (f"[keys.a]\n{HASH}tenat = 'a'\n", "tenat"),
        (f"[keys.a]\n{HASH}admin = true\nexpires = 2030-01-01T00:00:00\n", "needs a time zone"),
        (f"[keys.a]\n{HASH}admin = true\n[keys.b]\n{HASH}admin = true\n", "is the key of"),
        (f"[keys.a]\n{HASH}admin = true\nlimits.max_live_requests = -1\n", "max_live_requests"),
        ("[key.a]\n", "key"),
        ("keys = ", "Invalid value"),
    ],
)
def test_a_file_of_keys_is_refused_by_what_is_wrong(text, error):
    with pytest.raises(ConfigError, match=error):
        parse_keys(text, "keys.toml")
