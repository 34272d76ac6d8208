"""The status store in a real cluster, where a script may name keys of one slot only."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.status.records import Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from tests.headrace.status.conftest import immortal_keys
from tests.headrace.status.servers import HOST, cluster_store
from tests.headrace.waiting import until

pytestmark = pytest.mark.system

NUM_REQUESTS = 100


@pytest.fixture
async def cluster(tmp_path):
    async with cluster_store(tmp_path) as store:
        yield store
        for node in store.nodes:
            async with node.client() as client:
                assert not await immortal_keys(client)


@asynccontextmanager
async def running(store):
    async with store:
        task = asyncio.create_task(store.run())
        yield store
        task.cancel()
        await asyncio.wait([task])


def update(name, state, **known):
    owner = {"router_id": "r", "router_incarnation": "r1"}
    return Update(
        request_id=name, state=state, time_unix_s=1.0, create_time_unix_s=1.0, **owner, **known
    )


async def test_requests_are_written_to_all_nodes_and_read_back(cluster):
    async with running(StatusStore(cluster.url, Writer.ROUTER)) as store:
        for number in range(NUM_REQUESTS):
            store.record(update(f"r{number}", State.QUEUED, spec=b"spec", num_completions=1))
            store.record(update(f"r{number}", State.DISPATCHED))
        assert await store.flush(60)
        assert store.num_refused == 0
        assert {name async for name in store.live_ids()} == {
            f"r{number}" for number in range(NUM_REQUESTS)
        }
        for number in range(NUM_REQUESTS):
            found = await store.load(f"r{number}")
            assert found is not None
            assert (found.spec, found.completions[0].record.state) == (b"spec", State.DISPATCHED)
            claimed = await store.claim(
                found, State.ABORTED, router_id="other", router_incarnation="o1"
            )
            assert claimed is not None
        assert [name async for name in store.live_ids()] == []
    for node in cluster.nodes:
        async with node.client() as client:
            assert await client.dbsize() > 0


async def test_the_address_of_one_node_is_the_address_of_a_cluster_too(cluster):
    store = StatusStore(f"redis+cluster://{HOST}:{cluster.nodes[1].port}", Writer.ROUTER)
    async with running(store):
        for number in range(NUM_REQUESTS):
            store.record(update(f"r{number}", State.QUEUED))
        assert await store.flush(60)


async def test_writing_goes_on_when_a_node_was_away(cluster):
    async with running(StatusStore(cluster.url, Writer.ROUTER, timeout_s=1.0)) as store:
        for number in range(NUM_REQUESTS):
            store.record(update(f"a{number}", State.QUEUED))
        assert await store.flush(60)
        await cluster.nodes[0].stop()
        for number in range(NUM_REQUESTS):
            store.record(update(f"b{number}", State.QUEUED))
        assert not await store.flush(0.5)
        await until(lambda: not store.is_durable)
        await cluster.nodes[0].start()
        assert await store.flush(60)
        assert store.is_durable
