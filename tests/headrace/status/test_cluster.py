"""The status store on a node of a Valkey Cluster, where a call may name keys of one slot only."""

import asyncio
import contextlib

import pytest
import redis.asyncio
from redis.exceptions import RedisError

from headrace.status.embedded import find_server
from headrace.status.records import Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore

NUM_REQUESTS = 100


@pytest.fixture
async def cluster_url(tmp_path, unused_tcp_port_factory):
    """A cluster of one node that has every slot."""
    port = unused_tcp_port_factory()
    process = await asyncio.create_subprocess_exec(
        *(str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--save", ""),
        *("--cluster-enabled", "yes", "--cluster-port", str(unused_tcp_port_factory())),
        *("--dir", str(tmp_path)),
        stdout=asyncio.subprocess.DEVNULL,
    )
    url = f"redis://127.0.0.1:{port}"
    client = redis.asyncio.Redis.from_url(url, decode_responses=True)
    try:
        async with asyncio.timeout(60):
            while not await _is_formed(client):  # noqa: ASYNC110 the server tells nobody
                await asyncio.sleep(0.01)
        yield url
    finally:
        await client.aclose()
        process.terminate()
        await process.wait()


async def _is_formed(client) -> bool:
    with contextlib.suppress(RedisError, OSError):
        info = await client.cluster("INFO")
        if info["cluster_slots_assigned"] == "0":
            await client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        return info["cluster_state"] == "ok"
    return False


async def test_requests_of_many_slots_are_written_together(cluster_url):
    async with StatusStore(cluster_url, Writer.ROUTER) as store:
        running = asyncio.create_task(store.run())
        for number in range(NUM_REQUESTS):
            for state in (State.QUEUED, State.DISPATCHED):
                store.record(Update(request_id=f"r{number}", state=state, time_unix_s=1.0))
        assert await store.flush(60)
        assert store.num_refused == 0
        for number in range(NUM_REQUESTS):
            record = await store.get(f"r{number}")
            assert record is not None
            assert record.state is State.DISPATCHED
        running.cancel()
        await asyncio.wait([running])
