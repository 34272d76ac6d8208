"""The status store behind a real Sentinel."""

import asyncio
import os
import signal

import pytest

from headrace.service.errors import ServiceError
from headrace.status.records import Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from tests.headrace.status.conftest import immortal_keys
from tests.headrace.status.servers import HOST, sentinel_store
from tests.headrace.waiting import eventually

pytestmark = pytest.mark.system


@pytest.fixture
async def sentinels(tmp_path):
    async with sentinel_store(tmp_path) as store:
        yield store


def update(name):
    return Update(request_id=name, state=State.QUEUED, time_unix_s=1.0)


async def test_after_a_failover_the_new_master_is_written_to_and_the_old_one_is_not(sentinels):
    old, new = sentinels.servers
    async with (
        StatusStore(sentinels.url, Writer.ROUTER, timeout_s=1.0) as store,
        StatusStore(sentinels.url, Writer.ROUTER, timeout_s=1.0) as silent,
    ):
        await silent.apply(update("silent"))
        running = asyncio.create_task(store.run())
        store.record(update("before"))
        assert await store.flush(60)
        # The old master is cut off, and comes back when it is no master any more.
        os.kill(old.process.pid, signal.SIGSTOP)
        store.record(update("meanwhile"))

        async def has_failed_over():
            return await sentinels.master_port() == new.port

        await eventually(has_failed_over)
        assert await store.flush(60)
        assert store.is_durable
        os.kill(old.process.pid, signal.SIGCONT)
        # This writer still has a connection to the old master, and has noticed nothing.
        with pytest.raises(ServiceError, match="the master is at"):
            await silent.apply(update("silent-again"))
        await silent.apply(update("silent-again"))
        for number in range(50):
            store.record(update(f"after{number}"))
        assert await store.flush(60)
        assert await store.get("before") is not None
        async with new.client() as client:
            names = {key.split("{")[1].split("}")[0] async for key in client.scan_iter("*status*")}
            assert names == {
                *("before", "meanwhile", "silent", "silent-again"),
                *(f"after{number}" for number in range(50)),
            }
            assert not await immortal_keys(client)
        running.cancel()
        await asyncio.wait([running])


async def test_without_a_master_that_a_sentinel_names_nothing_is_written(sentinels):
    url = sentinels.url.replace("/headrace", "/other")
    async with StatusStore(url, Writer.ROUTER) as store:
        with pytest.raises(ServiceError, match="No master found for 'other'"):
            await store.apply(update("r1"))


async def test_a_sentinel_that_is_away_is_passed_over(sentinels):
    os.kill(sentinels.sentinels[0].process.pid, signal.SIGSTOP)
    async with StatusStore(sentinels.url, Writer.ROUTER, timeout_s=1.0) as store:
        await store.ping()


async def test_a_url_without_a_master_is_refused():
    for url in (f"redis+sentinel://{HOST}:1", "redis+sentinel://h/m/x", "redis+cluster://"):
        with pytest.raises(ValueError, match="store URL"):
            StatusStore(url, Writer.ROUTER)
