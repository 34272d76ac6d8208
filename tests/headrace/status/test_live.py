"""Leases, and finding the requests of dead routers, against a real Valkey."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from headrace.service.errors import ServiceError
from headrace.status import live
from headrace.status.records import Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from tests.headrace.waiting import eventually

NOW = 1_700_000_000.5


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@asynccontextmanager
async def holding(store, role, name, incarnation):
    """Holds a lease; returns once it is held."""
    task = asyncio.create_task(store.hold_lease(role, name, incarnation))
    try:

        async def is_held():
            is_there = await store.incarnation_of(role, name) == incarnation
            return is_there and store._backend.live._holds_since is not None

        await eventually(is_held)
        yield
    finally:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
async def router(embedded, clock):
    async with StatusStore(embedded.url, Writer.ROUTER, clock=clock) as store:
        yield store


async def queue(store, name, router_id, incarnation, created=NOW, **more):
    await store.apply(
        Update(
            request_id=name,
            state=State.QUEUED,
            time_unix_s=NOW,
            create_time_unix_s=created,
            router_id=router_id,
            router_incarnation=incarnation,
            **more,
        )
    )


async def orphans(store):
    return {records[0].request_id async for records in store.orphans()}


async def live_ids(store):
    return {request_id async for request_id in store.live_ids()}


async def test_a_lease_is_there_while_its_process_lives(router, embedded, client):
    assert await router.incarnation_of("scheduler", "s") == ""
    async with holding(router, "scheduler", "s", "one"):
        assert await router.incarnation_of("router", "s") == ""
        (key,) = [key async for key in client.scan_iter("*lease*")]
        assert 0 < await client.pttl(key) <= live.LEASE_TTL_S * 1000
        async with (
            StatusStore(embedded.url, Writer.ROUTER) as later,
            holding(later, "scheduler", "s", "two"),
        ):
            assert await router.is_dead("scheduler", "s", "one")
            assert not await router.is_dead("scheduler", "s", "two")
            assert not await router.is_dead("scheduler", "s", "")


async def test_the_earlier_of_two_processes_of_one_name_says_so(
    router, embedded, caplog, monkeypatch
):
    monkeypatch.setattr(live, "_LEASE_PERIOD_S", 0.01)
    async with (
        StatusStore(embedded.url, Writer.ROUTER) as later,
        holding(router, "router", "r", "one"),
        holding(later, "router", "r", "two"),
    ):

        async def has_said():
            return "another router runs under the name 'r'" in caplog.text

        await eventually(has_said)
        assert await router.incarnation_of("router", "r") == "two"


async def test_a_missing_lease_means_death_once_everyone_had_time_to_renew(router, clock):
    assert not await router.is_dead("router", "gone", "g1")
    async with holding(router, "router", "me", "m1"):
        assert not await router.is_dead("router", "gone", "g1")
        clock.now += live.LEASE_TTL_S
        assert await router.is_dead("router", "gone", "g1")
        assert not await router.is_dead("router", "me", "m1")


async def test_a_failure_of_any_call_gives_everyone_time_again(router, client, clock):
    async with holding(router, "router", "me", "m1"):
        clock.now += live.LEASE_TTL_S
        assert await router.is_dead("router", "gone", "g1")
        await client.set("headrace:2:{r1}:status#0", "not a hash", ex=1000)
        with pytest.raises(ServiceError):
            await router.get("r1")
        assert not await router.is_dead("router", "gone", "g1")
        clock.now += live.LEASE_TTL_S
        assert await router.is_dead("router", "gone", "g1")


async def test_a_store_that_was_away_gives_everyone_time_again(
    router, embedded, clock, monkeypatch
):
    monkeypatch.setattr(live, "_LEASE_PERIOD_S", 0.01)
    monkeypatch.setattr(live, "_LEASE_RETRY_S", 0.01)
    async with holding(router, "router", "me", "m1"):
        clock.now += live.LEASE_TTL_S
        assert await router.is_dead("router", "gone", "g1")
        embedded._process.kill()

        async def has_noticed():
            try:
                return not await router.is_dead("router", "gone", "g1")
            except ServiceError:
                return False

        await eventually(has_noticed)


async def test_the_requests_of_a_dead_router_are_found(router, clock):
    await queue(router, "of-the-dead", "r", "r1")
    for k in range(2):
        await queue(router, f"two#{k}", "r", "r1", NOW + k * 1e-6, num_completions=2)
    await queue(router, "mine", "me", "m1")
    async with holding(router, "router", "me", "m1"):
        assert await orphans(router) == set()
        async with holding(router, "router", "r", "r2"):
            assert await orphans(router) == {"of-the-dead", "two#0"}
    assert await live_ids(router) == {"of-the-dead", "two", "mine"}


async def test_a_request_that_has_ended_is_found_no_more(router, embedded, client):
    async with StatusStore(embedded.url, Writer.SCHEDULER) as scheduler:
        for k in range(2):
            name = f"r1#{k}"
            created = NOW + k * 1e-6
            await queue(router, name, "r", "r1", created, num_completions=2)
            told = {"request_id": name, "time_unix_s": NOW, "create_time_unix_s": created}
            await router.apply(Update(state=State.DISPATCHED, **told))
            assert await live_ids(router) == {"r1"}
            await scheduler.apply(Update(state=State.STOPPED, **told))
        key = "headrace:2:{live:r1:r}"
        assert await client.smembers(key) == {f"r1 {NOW}"}
        # The set is put in order with the next batch of whoever wrote the end.
        await queue(router, "r2", "r", "r1")
        await scheduler._backend.batches.evaluate([])
        assert await client.smembers(key) == {f"r2 {NOW}"}


@pytest.fixture
async def wrong_members(router, client):
    """The key of a set with a right member and two wrong ones."""
    await queue(router, "r1", "r", "r1")
    key = "headrace:2:{live:r1:r}"
    await client.sadd(key, "never-was 1.0", f"r1 {NOW - 1}")
    return key


async def test_readers_remove_what_is_wrong_in_the_sets_of_the_dead(router, client, wrong_members):
    assert await live_ids(router) == {"r1"}
    assert await client.scard(wrong_members) == 3
    async with holding(router, "router", "r", "r2"):
        assert await live_ids(router) == {"r1"}
    assert await client.smembers(wrong_members) == {f"r1 {NOW}"}


async def test_a_living_router_removes_what_is_wrong_in_its_own_set(
    router, client, monkeypatch, wrong_members
):
    monkeypatch.setattr(live, "_LEASE_PERIOD_S", 0.01)
    async with holding(router, "router", "r", "r1"):

        async def is_tidy():
            return await client.smembers(wrong_members) == {f"r1 {NOW}"}

        await eventually(is_tidy)


async def test_a_claimed_request_belongs_to_its_new_router(router):
    await queue(router, "r1", "r", "r1")
    found = await router.load("r1")
    async with holding(router, "router", "r", "r2"):
        assert await router.claim(found, State.QUEUED, router_id="me", router_incarnation="m1")
        assert await orphans(router) == set()
        async with holding(router, "router", "me", "m2"):
            assert await orphans(router) == {"r1"}


async def test_a_router_without_requests_is_forgotten(router, client):
    await queue(router, "r1", "r", "r1")
    found = await router.load("r1")
    async with holding(router, "router", "r", "r2"):
        await router.claim(found, State.ABORTED, router_id="r", router_incarnation="r2")
        for _ in range(2):
            assert await orphans(router) == set()
    assert not await client.exists("headrace:2:{routers}")


async def test_without_a_store_nobody_is_dead_and_nothing_is_found():
    async with StatusStore("", Writer.ROUTER) as store:
        assert await store.incarnation_of("router", "r") == ""
        assert not await store.is_dead("router", "r", "r1")
        assert await orphans(store) == set()
        assert await live_ids(store) == set()
