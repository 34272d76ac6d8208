"""The embedded Valkey: started, private, restarted, and gone with us."""

import asyncio
import os
import signal
import stat
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import redis.asyncio
from redis.exceptions import AuthenticationError

from headrace.status import embedded as embedded_module
from headrace.status.embedded import (
    EmbeddedStore,
    EmbeddedStoreError,
    default_data_dir,
    find_server,
)
from tests.headrace.waiting import eventually

pytestmark = pytest.mark.system


async def test_it_is_private_and_asks_for_its_password(embedded):
    socket = Path(embedded.url.removeprefix("unix://").partition("?")[0])
    assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    async with redis.asyncio.Redis.from_url(f"unix://{socket}") as stranger:
        with pytest.raises(redis.ConnectionError) as refused:
            await stranger.ping()
    assert isinstance(refused.value.__cause__, AuthenticationError)
    command_line = " ".join(psutil.Process(embedded.pid).cmdline())
    assert embedded.url.rpartition("=")[2] not in command_line


async def test_it_listens_on_no_port(embedded):
    connections = psutil.Process(embedded.pid).net_connections("inet")
    assert not [c for c in connections if c.status == psutil.CONN_LISTEN]


async def test_it_is_started_again_with_its_data_when_it_is_killed(embedded):
    async with redis.asyncio.Redis.from_url(embedded.url) as client:
        await client.set("key", "value", ex=1000)
        before = embedded.pid
        os.kill(before, signal.SIGKILL)

        async def is_back():
            try:
                return embedded.pid != before and await client.get("key") == b"value"
            except (redis.ConnectionError, OSError):
                return False

        await eventually(is_back)


async def test_it_leaves_nothing_behind_when_stopped():
    async with EmbeddedStore() as server:
        pid, folder = server.pid, server._private_dir
    assert not psutil.pid_exists(pid)
    assert folder is not None
    assert not folder.exists()


async def test_a_data_folder_that_is_given_outlives_it(tmp_path):
    for _ in range(2):
        async with (
            EmbeddedStore(tmp_path / "data") as server,
            redis.asyncio.Redis.from_url(server.url) as client,
        ):
            count = await client.incr("count")
            await client.expire("count", 1000)
    assert count == 2


async def test_a_damaged_file_is_set_aside(tmp_path, caplog):
    for _ in range(2):
        async with (
            EmbeddedStore(tmp_path) as server,
            redis.asyncio.Redis.from_url(server.url) as client,
        ):
            assert await client.get("key") is None
            await client.set("key", "value", ex=1000)
            await client.set("other", "value", ex=1000)
        (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
        content = bytearray(file.read_bytes())
        content[60:70] = bytes(10)
        file.write_bytes(content)
    assert (tmp_path / "appendonlydir.damaged").exists()
    assert "set aside" in caplog.text


async def test_a_data_folder_has_one_store_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_module, "_LOCK_TIMEOUT_S", 0.0)
    async with EmbeddedStore(tmp_path / "data"):
        with pytest.raises(
            EmbeddedStoreError, match="another `headrace serve` uses the data folder"
        ):
            async with EmbeddedStore(tmp_path / "data"):
                pass
    async with EmbeddedStore(tmp_path / "data"):
        pass


async def test_a_data_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EmbeddedStoreError, match="cannot be written"):
        async with EmbeddedStore(tmp_path / "file" / "data"):
            pass


def test_data_is_kept_in_the_users_state_folder(tmp_path):
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert default_data_dir("8700", environ) == tmp_path / "headrace" / "store-8700"
    for relative in ({}, {"XDG_STATE_HOME": "relative"}):
        home = Path.home() / ".local" / "state"
        assert default_data_dir("a", relative) == home / "headrace" / "store-a"


async def test_a_server_that_cannot_start_says_why(tmp_path):
    broken = tmp_path / "valkey-server"
    broken.write_text("#!/bin/sh\necho out of cheese >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(EmbeddedStoreError, match="out of cheese"):
        async with EmbeddedStore(server=broken):
            pass


def test_a_server_on_path_comes_first(tmp_path, monkeypatch):
    assert find_server().exists()
    own = tmp_path / "redis-server"
    own.write_text("")
    own.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert embedded_module.find_server() == own


PARENT = """
import asyncio, sys
from pathlib import Path
from redis.asyncio import Redis
from headrace.status.embedded import EmbeddedStore

async def main():
    async with EmbeddedStore(*map(Path, sys.argv[1:])) as server:
        print(server.pid, server._private_dir, flush=True)
        async with Redis.from_url(server.url) as client:
            await client.set("key", "value", ex=1000)
        print("key", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


def folders():
    return set(map(str, Path(tempfile.gettempdir()).glob("headrace-*")))


async def test_it_dies_with_a_parent_that_is_killed():
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid, folder = (await parent.stdout.readline()).decode().split()
    child = psutil.Process(int(pid))
    parent.kill()
    await parent.communicate()

    async def is_gone():
        return not child.is_running() or child.status() == psutil.STATUS_ZOMBIE

    await eventually(is_gone)
    async with EmbeddedStore():
        assert folder not in folders(), "the next start clears up"


async def test_the_data_of_a_killed_parent_are_there_for_the_next(tmp_path):
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(tmp_path)), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline()
    key = (await parent.stdout.readline()).decode().strip()
    parent.kill()
    # At once: the killed parent's server may still be there.
    async with (
        EmbeddedStore(tmp_path) as server,
        redis.asyncio.Redis.from_url(server.url) as client,
    ):
        assert await client.get(key) == b"value"
    await parent.communicate()
