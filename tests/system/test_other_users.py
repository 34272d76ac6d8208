"""What another user of this machine reaches of `headrace serve`: the router, and nothing else."""

import asyncio
import os
import socket
import sys
from pathlib import Path

import psutil
import pytest

from headrace.client import HeadraceClient
from headrace.local import local_pool
from tests.headrace.test_local import config

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user"),
]

OTHER_UID = 65534

CONNECT = """
import os, socket, sys
os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        print("reached", path)
    except PermissionError:
        print("refused")
"""


def listening(processes) -> tuple[set[str], set[int]]:
    """Paths and ports that the processes listen on."""
    paths, ports = set(), set()
    for process in processes:
        for connection in process.net_connections("unix"):
            if connection.laddr:
                paths.add(connection.laddr)
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                ports.add(connection.laddr.port)
    return paths, ports


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_another_user_reaches_the_router_alone(num_workers, monkeypatch):
    monkeypatch.setenv("FAKE_READY_WORKERS", str(num_workers))
    before = set(psutil.Process().children(recursive=True))
    async with local_pool(config(num_workers=num_workers)) as pool:
        started = set(psutil.Process().children(recursive=True)) - before
        paths, ports = listening(started)
        assert ports == {int(pool.address.rpartition(":")[2])}
        names = {Path(path).name for path in paths}
        workers = ["gpuworker"] if num_workers == 1 else ["gpuworker-0", "gpuworker-1"]
        assert names == {"store.sock", "scheduler.sock", *(f"{name}.sock" for name in workers)}
        for path in paths:
            with socket.socket(socket.AF_UNIX) as ours:
                ours.connect(path)
        other = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CONNECT, str(OTHER_UID), *paths),
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await other.communicate()
        assert said.split() == [b"refused"] * len(paths)
        async with HeadraceClient(pool.address) as client:
            assert (await client.complete("hi")).text == "hi"
