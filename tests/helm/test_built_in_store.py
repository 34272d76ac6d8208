"""The built-in store's settings, read by a real Valkey, and the URL that the services get."""

import asyncio
import contextlib

import pytest
import redis.asyncio
from redis.exceptions import AuthenticationError, RedisError

from headrace.status.connect import make_client
from headrace.status.embedded import find_server
from tests.headrace.status.servers import HOST, free_ports
from tests.headrace.waiting import eventually


@pytest.fixture
async def store(chart, tmp_path):
    """A running Valkey with the chart's files, and the services' URL for it."""
    objects = chart.render()
    secret = objects.one("Secret", "store")["stringData"]
    (port,) = free_ports(1)
    (tmp_path / "password.conf").write_text(secret["valkey.conf"])
    text = objects.file("store", "valkey.conf")
    for there, here in (
        ("/etc/valkey-password/valkey.conf", str(tmp_path / "password.conf")),
        ("/data", str(tmp_path)),
        ("port 6379", f"port {port}"),
    ):
        assert there in text
        text = text.replace(there, here)
    (tmp_path / "valkey.conf").write_text(text)
    process = await asyncio.create_subprocess_exec(
        str(find_server()), str(tmp_path / "valkey.conf"), stdout=asyncio.subprocess.DEVNULL
    )
    address = "hr-headrace-store.space.svc.cluster.local:6379"
    assert address in secret["url"]
    yield secret["url"].replace(address, f"{HOST}:{port}")
    process.kill()
    await process.wait()


async def test_the_services_url_opens_it_and_no_other_does(store):
    async with make_client(store, timeout_s=30) as client:

        async def answers():
            with contextlib.suppress(RedisError, OSError):
                return await client.ping()

        await eventually(answers)
        assert (await client.config_get("appendonly"))["appendonly"] == "yes"
    port = int(store.rpartition(":")[2].partition("/")[0])
    async with redis.asyncio.Redis(host=HOST, port=port) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.ping()
