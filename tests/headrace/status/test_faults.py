"""A store that is slow, full, read-only, forgetful or refuses us: nothing waits, all catches up."""

import asyncio
from array import array
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from headrace.service.errors import ServiceError
from headrace.status import write_behind
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from tests.headrace.status.holding_proxy import HoldingProxy
from tests.headrace.status.journal_source import ListSource, piece, update
from tests.headrace.waiting import until

pytestmark = pytest.mark.system


@asynccontextmanager
async def running(url, writer, **options):
    async with StatusStore(url, writer, **options) as store:
        store.source = ListSource()
        task = asyncio.create_task(store.run())
        try:
            yield store
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture
async def router(embedded):
    async with running(embedded.url, Writer.ROUTER) as store:
        await until(lambda: store.is_durable)
        yield store


async def test_a_slow_store_delays_nobody_and_gets_everything_in_the_end(embedded, tmp_path):
    parts = urlsplit(embedded.url)
    async with HoldingProxy(parts.path, tmp_path / "proxy.sock") as proxy:
        url = f"unix://{tmp_path}/proxy.sock?{parts.query}"
        async with (
            running(url, Writer.ROUTER, timeout_s=0.2) as router,
            running(url, Writer.SCHEDULER, timeout_s=0.2) as scheduler,
        ):
            await until(lambda: router.is_durable and scheduler.is_durable)
            proxy.hold()
            router.record(update(State.QUEUED, spec=b"spec"))
            router.record(update(State.DISPATCHED))
            scheduler.source.items = [piece(0, 1, 2)]
            await until(lambda: not router.is_durable and not scheduler.is_durable)
            with pytest.raises(ServiceError) as slow:
                await router.load("r1")
            assert slow.value.reason == "STORE_UNAVAILABLE"
            scheduler.source.items += [piece(2, 3), update(State.STOPPED, completion_tokens=3)]
            proxy.release()
            await until(lambda: router.is_durable and scheduler.is_durable)
            assert await router.flush(30)
            assert await scheduler.flush(30)
            found = await router.load("r1")
            assert found is not None
            assert found.completions[0].is_complete
            assert found.spec == b"spec"


async def test_a_full_store_is_not_durable_until_there_is_room(router, client):
    await client.config_set("maxmemory", 1)
    router.record(update(State.QUEUED, spec=b"spec"))
    await until(lambda: not router.is_durable)
    await client.config_set("maxmemory", 0)
    assert await router.flush(30)
    assert router.is_durable
    assert (await router.load("r1")).spec == b"spec"


async def test_a_replica_is_not_written_to_until_it_is_a_master(router, client):
    await client.replicaof("127.0.0.1", "1")
    router.record(update(State.QUEUED))
    await until(lambda: not router.is_durable)
    await client.replicaof("NO", "ONE")
    assert await router.flush(30)
    assert router.is_durable


async def test_a_wrong_password_is_tried_once(embedded, client):
    url = embedded.url.replace("password=", "password=wrong")
    async with StatusStore(url, Writer.ROUTER) as store:
        store.record(update(State.QUEUED))
        await store.run()
        lease = asyncio.create_task(store.hold_lease("router", "r", "r1"))
        for call in (store.ping(), store.load("r1"), store.apply(update(State.QUEUED))):
            with pytest.raises(ServiceError) as refused:
                await call
            assert refused.value.reason == "STORE_REFUSED"
        lease.cancel()
        await asyncio.wait([lease])
    attempts = [entry for entry in await client.acl_log() if entry["reason"] == "auth"]
    assert sum(int(entry["count"]) for entry in attempts) == 1


async def test_a_request_that_the_store_has_forgotten_is_given_up_and_said_once(
    embedded, router, client, monkeypatch, caplog
):
    monkeypatch.setattr(write_behind, "_EARLY_PATIENCE_S", 0.05)
    async with running(embedded.url, Writer.SCHEDULER) as scheduler:
        router.record(update(State.QUEUED))
        router.record(update(State.DISPATCHED))
        assert await router.flush(30)
        scheduler.source.items = [piece(0, 1)]
        assert await scheduler.flush(30)
        await client.flushall()
        for position in range(1, 5):
            scheduler.source.items = [piece(position, 1)]
            assert await scheduler.flush(30)
        scheduler.source.items = [update(State.STOPPED)]
        assert await scheduler.flush(30)
        # The id is used again.
        router.record(update(State.QUEUED, create_time_unix_s=1e10))
        router.record(update(State.DISPATCHED, create_time_unix_s=1e10))
        assert await router.flush(30)
        scheduler.source.items = [piece(0, 7, create_time_unix_s=1e10)]
        assert await scheduler.flush(30)
    assert len([r for r in caplog.records if "never became possible" in r.message]) == 1
    found = await router.load("r1")
    assert list(array("i", found.completions[0].token_ids)) == [7]


async def test_lost_tokens_are_written_again_when_the_store_went_back_in_time(
    embedded, router, client
):
    async with running(embedded.url, Writer.SCHEDULER) as scheduler:
        router.record(update(State.QUEUED))
        router.record(update(State.DISPATCHED))
        assert await router.flush(30)
        scheduler.source.items = [piece(0, 1, 2, 3)]
        assert await scheduler.flush(30)
        await client.delete("headrace:2:{r1}:tokens#0")
        scheduler.source.known["r1"] = [1, 2, 3, 4]
        scheduler.source.items = [piece(3, 4)]
        assert await scheduler.flush(30)
    found = await router.load("r1")
    assert list(array("i", found.completions[0].token_ids)) == [1, 2, 3, 4]


async def test_a_key_of_another_program_holds_up_no_other_request(router, client):
    await client.set("headrace:2:{theirs}:status#0", "x", ex=1000)
    router.record(update(State.QUEUED, "theirs"))
    router.record(update(State.QUEUED, "r1"))
    assert await router.flush(30)
    assert router.is_durable
    assert router.num_refused == 1
    assert await router.get("r1") is not None
