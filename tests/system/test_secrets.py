"""Real processes with every kind of secret meet errors and callers, and say none of the secrets.

The scheduler has the settings, ports and store of all services, and needs no model.
"""

import asyncio
import os
import signal
import sys
from pathlib import Path

import grpc.aio
import pytest
import trustme

from headrace.service.config import load
from headrace.service.keys import make_key, section
from headrace.v1 import inference_pb2, scheduler_pb2_grpc
from router.config import RouterConfig
from scheduler.config import SchedulerSettings
from tests.headrace.waiting import eventually, until

pytestmark = pytest.mark.system


@pytest.mark.parametrize("struct", [RouterConfig, SchedulerSettings])
def test_the_store_s_password_is_in_no_repr_of_settings(struct):
    url = "redis://user:hidden-password@store:6379"
    settings = load(struct, section="router", overrides={"store_url": url})
    assert settings.store_url == url
    assert "hidden" not in f"{settings} {settings!r}"


def secrets_in(folder: Path) -> dict[str, str]:
    """Files for each secret; what must be in no output."""
    certificate = trustme.CA().issue_cert("localhost")
    key = certificate.private_key_pem.bytes().decode()
    (folder / "tls.pem").write_bytes(certificate.cert_chain_pems[0].bytes())
    (folder / "tls.key").write_text(key)
    secrets = {name: make_key() for name in ("token", "next", "sent", "key", "wrong")}
    for name in ("token", "sent"):
        (folder / name).write_text(secrets[name])
    (folder / "keys.toml").write_text(section("k", secrets["key"], "acme", None))
    return secrets | {"password": "store-password-1", "private": key.splitlines()[1]}


async def refusals(address: str, secrets: dict[str, str]) -> None:
    """Calls with each kind of key."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        for name in ("token", "key", "wrong"):
            metadata = (("authorization", f"Bearer {secrets[name]}"),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Explain(
                    inference_pb2.ExplainRequest(request_id="none"), metadata=metadata, timeout=20
                )
            assert secrets[name] not in str(caught.value)


async def test_a_service_that_meets_errors_names_no_secret(tmp_path):
    secrets = secrets_in(tmp_path)
    address_file, output = tmp_path / "address", tmp_path / "output"
    url = f"redis://:{secrets['password']}@127.0.0.1:1/0"
    with output.open("wb") as stream:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "faulthandler", "-m", "scheduler", "--log-level", "debug"),
            *("--worker", "127.0.0.1:1", "--worker-auth-token-file", str(tmp_path / "sent")),
            *("--auth-token-file", str(tmp_path / "token")),
            *("--api-keys-file", str(tmp_path / "keys.toml")),
            *("--address-file", str(address_file), "--drain-timeout-s", "0"),
            env=os.environ | {"HEADRACE_SCHEDULER_STORE_URL": url, "HEADRACE_PARENT_DEATH": "1"},
            stdout=stream,
            stderr=stream,
        )
        try:
            async with asyncio.timeout(60):
                await until(address_file.exists)
                address = address_file.read_text()
                await refusals(address, secrets)
                # A rotation that went wrong, and keys where their hashes belong.
                (tmp_path / "token").write_text(f"{secrets['next']}\nbr\xf6ken")
                (tmp_path / "keys.toml").write_text(f"[keys.k]\nsha256 = '{secrets['key']}'")

                async def has_logged():
                    await refusals(address, secrets)
                    text = output.read_text()
                    return "cannot be used" in text and "127.0.0.1:1 is not ready" in text

                await eventually(has_logged)
                process.send_signal(signal.SIGABRT)  # what a crash says
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    text = output.read_text()
    assert "Fatal Python error: Aborted" in text
    assert [name for name, secret in secrets.items() if secret in text] == []
