"""Compare-and-set of records, against a real Valkey."""

import asyncio
import os
import signal
import sys

import pytest

from headrace.service.errors import ServiceError
from headrace.status.records import Update, Verdict
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore

NOW = 1_700_000_000.5


def update(state, request_id="r1", epoch=1, **known):
    return Update(request_id=request_id, state=state, epoch=epoch, time_unix_s=NOW, **known)


@pytest.fixture
async def router(embedded):
    async with StatusStore(embedded.url, Writer.ROUTER) as store:
        yield store


@pytest.fixture
async def scheduler(embedded):
    async with StatusStore(embedded.url, Writer.SCHEDULER) as store:
        yield store


async def verdict(store, state, **more):
    return (await store.apply(update(state, **more))).verdict


async def running(router, scheduler):
    assert await verdict(router, State.QUEUED) is Verdict.APPLIED
    assert await verdict(router, State.DISPATCHED) is Verdict.APPLIED
    assert await verdict(scheduler, State.RUNNING) is Verdict.APPLIED


async def test_a_record_keeps_what_each_update_knows(router, scheduler):
    await router.apply(
        update(State.QUEUED, create_time_unix_s=NOW, tenant="t", model="m", prompt_tokens=7)
    )
    await router.apply(update(State.DISPATCHED, scheduler_id="s0"))
    await scheduler.apply(update(State.RUNNING, worker_id="w0"))
    await scheduler.apply(update(State.STOPPED, completion_tokens=3, detail="end of sequence"))
    record = await router.get("r1")
    assert record is not None
    assert (record.state, record.epoch, record.create_time_unix_s) == (State.STOPPED, 1, NOW)
    assert (record.tenant, record.model, record.detail) == ("t", "m", "end of sequence")
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
    assert (record.scheduler_id, record.worker_id) == ("s0", "w0")


async def test_an_unknown_request_has_no_record(router):
    assert await router.get("nobody") is None
    assert await router.get("no such id!") is None


async def test_a_final_state_is_not_left(router, scheduler):
    await running(router, scheduler)
    assert await verdict(scheduler, State.STOPPED) is Verdict.APPLIED
    outcome = await scheduler.apply(update(State.RUNNING))
    assert (outcome.verdict, outcome.state) == (Verdict.ILLEGAL, State.STOPPED)
    assert await verdict(scheduler, State.ABORTED) is Verdict.ILLEGAL
    assert await verdict(router, State.QUEUED) is Verdict.ILLEGAL
    assert await verdict(router, State.DISPATCHED, epoch=2) is Verdict.STALE


FIRST, AGAIN = {"create_time_unix_s": NOW}, {"create_time_unix_s": NOW + 1}


async def test_an_id_that_is_used_again_gets_a_new_record(router, scheduler):
    for state in (State.QUEUED, State.DISPATCHED):
        await router.apply(update(state, epoch=3, tenant="old", detail="old", **FIRST))
    for state in (State.RUNNING, State.STOPPED):
        await scheduler.apply(update(state, epoch=3, completion_tokens=9, **FIRST))
    for store, state in (
        (router, State.QUEUED),
        (router, State.DISPATCHED),
        (scheduler, State.RUNNING),
        (scheduler, State.STOPPED),
    ):
        assert await verdict(store, state, tenant="new", **AGAIN) is Verdict.APPLIED
        record = await router.get("r1")
        assert record is not None
        assert (record.state, record.epoch, record.tenant) == (state, 1, "new")
        assert (record.detail, record.completion_tokens) == ("", 0)
        assert record.create_time_unix_s == NOW + 1


async def test_what_is_written_late_for_an_earlier_request_of_the_id_is_stale(router, scheduler):
    await router.apply(update(State.QUEUED, **FIRST))
    await router.apply(update(State.DISPATCHED, **FIRST))
    # Its end is still on its way, or never comes.
    assert await verdict(router, State.QUEUED, **AGAIN) is Verdict.APPLIED
    assert await verdict(scheduler, State.STOPPED, **FIRST) is Verdict.STALE
    assert await verdict(router, State.DISPATCHED, epoch=2, **FIRST) is Verdict.STALE
    assert await verdict(router, State.DISPATCHED, **AGAIN) is Verdict.APPLIED


async def test_a_scheduler_may_be_early_for_a_request_that_uses_an_id_again(router, scheduler):
    await router.apply(update(State.QUEUED, **FIRST))
    await router.apply(update(State.ABORTED, **FIRST))
    assert await verdict(scheduler, State.RUNNING, **AGAIN) is Verdict.EARLY
    await router.apply(update(State.QUEUED, **AGAIN))
    assert await verdict(scheduler, State.RUNNING, **AGAIN) is Verdict.EARLY
    await router.apply(update(State.DISPATCHED, **AGAIN))
    assert await verdict(scheduler, State.RUNNING, **AGAIN) is Verdict.APPLIED


async def test_a_request_that_is_not_let_in_hides_no_live_one_of_its_id(router):
    await router.apply(update(State.QUEUED, **FIRST))
    assert await verdict(router, State.REJECTED, **AGAIN) is Verdict.ILLEGAL
    await router.apply(update(State.ABORTED, **FIRST))
    assert await verdict(router, State.REJECTED, **AGAIN) is Verdict.APPLIED


async def test_a_step_back_within_an_epoch_is_illegal(router, scheduler):
    await running(router, scheduler)
    assert await verdict(router, State.EXPIRED) is Verdict.ILLEGAL
    record = await router.get("r1")
    assert record is not None
    assert record.state is State.RUNNING


async def test_a_change_that_overtakes_another_writers_is_early(router, scheduler):
    assert await verdict(scheduler, State.RUNNING) is Verdict.EARLY
    assert await verdict(router, State.QUEUED) is Verdict.APPLIED
    assert await verdict(scheduler, State.RUNNING) is Verdict.EARLY
    assert await verdict(router, State.DISPATCHED) is Verdict.APPLIED
    assert await verdict(scheduler, State.RUNNING) is Verdict.APPLIED


async def test_a_repeated_update_changes_nothing_but_numbers(router, scheduler):
    await running(router, scheduler)
    repeated = await verdict(scheduler, State.RUNNING, completion_tokens=5)
    assert repeated is Verdict.REPEATED
    record = await router.get("r1")
    assert record is not None
    assert record.completion_tokens == 5
    assert await verdict(scheduler, State.STOPPED, detail="first") is Verdict.APPLIED
    assert await verdict(scheduler, State.STOPPED, detail="second") is Verdict.REPEATED
    record = await router.get("r1")
    assert record is not None
    assert record.detail == "first"


async def test_the_writer_of_an_older_epoch_is_refused(router, scheduler):
    await running(router, scheduler)
    assert await verdict(router, State.DISPATCHED, epoch=2) is Verdict.APPLIED
    outcome = await scheduler.apply(update(State.STOPPED, epoch=1))
    assert (outcome.verdict, outcome.epoch) == (Verdict.STALE, 2)
    assert await verdict(scheduler, State.RUNNING, epoch=2) is Verdict.APPLIED


async def test_a_scheduler_that_was_started_again_writes_on_under_its_name(router, scheduler):
    await running(router, scheduler)
    before = {"scheduler_id": "s0", "scheduler_incarnation": "1"}
    assert await verdict(scheduler, State.PREEMPTED, **before) is Verdict.APPLIED
    again = {"epoch": 2, "scheduler_id": "s0"}
    assert await verdict(router, State.DISPATCHED, **again) is Verdict.APPLIED
    after = again | {"scheduler_incarnation": "2"}
    assert await verdict(scheduler, State.RUNNING, **after) is Verdict.APPLIED
    late = again | {"scheduler_incarnation": "1"}
    assert await verdict(scheduler, State.STOPPED, **late) is Verdict.STALE


async def test_a_scheduler_of_a_newer_epoch_waits_for_the_routers_re_dispatch(router, scheduler):
    await running(router, scheduler)
    assert await verdict(scheduler, State.RUNNING, epoch=2) is Verdict.EARLY


async def test_a_taken_back_request_can_wait_in_the_queue_again(router, scheduler):
    await running(router, scheduler)
    assert await verdict(router, State.QUEUED) is Verdict.ILLEGAL
    assert await verdict(router, State.QUEUED, epoch=2) is Verdict.APPLIED
    assert await verdict(router, State.ERROR, epoch=2) is Verdict.APPLIED


async def test_states_of_the_other_writer_and_bad_ids_are_our_own_bug(router, scheduler):
    with pytest.raises(ValueError, match="never written by the router"):
        await router.apply(update(State.RUNNING))
    with pytest.raises(ValueError, match="never written by the scheduler"):
        scheduler.record(update(State.EXPIRED))
    with pytest.raises(ValueError, match="not a request id"):
        router.record(update(State.QUEUED, request_id="a}b"))


async def test_a_finished_record_lives_shorter_than_a_live_one(embedded, client):
    async with (
        StatusStore(embedded.url, Writer.ROUTER, live_ttl_s=100, finished_ttl_s=5) as store,
    ):
        key = "headrace:2:{r1}:status#0"
        await store.apply(update(State.QUEUED))
        assert 95_000 < await client.pttl(key) <= 100_000
        await store.apply(update(State.ABORTED))
        assert 0 < await client.pttl(key) <= 5_000


async def test_a_flushed_server_is_taught_the_script_again(router, client):
    await router.apply(update(State.QUEUED))
    await client.script_flush()
    assert await verdict(router, State.DISPATCHED) is Verdict.APPLIED


async def test_a_wrong_password_says_so_and_is_not_tried_again(embedded, caplog):
    url = embedded.url.replace("password=", "password=wrong")
    async with StatusStore(url, Writer.ROUTER) as store:
        with pytest.raises(ServiceError) as refused:
            await store.ping()
        assert refused.value.reason == "STORE_REFUSED"
        store.record(update(State.QUEUED))
        await store.run()
        assert not store.is_durable
        assert not await store.flush(0.1)
    assert "refused us" in caplog.text


async def test_a_store_that_is_not_there_is_unavailable(tmp_path):
    async with StatusStore(f"unix://{tmp_path}/none.sock", Writer.ROUTER) as store:
        for call in (store.ping(), store.get("r1"), store.apply(update(State.QUEUED))):
            with pytest.raises(ServiceError) as away:
                await call
            assert away.value.reason == "STORE_UNAVAILABLE"


async def test_no_url_is_no_store():
    async with StatusStore("", Writer.ROUTER) as store:
        store.record(update(State.QUEUED))
        await store.run()
        await store.ping()
        assert await store.flush(0)
        assert await store.get("r1") is None
        assert not store.is_configured
        assert not store.is_durable


WRITER = """
import asyncio, sys
from headrace.status.records import Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore

async def main():
    async with StatusStore(sys.argv[1], Writer.ROUTER) as store, asyncio.TaskGroup() as tasks:
        tasks.create_task(store.run())
        for n in range(10**9):
            for state in (State.QUEUED, State.DISPATCHED):
                store.record(Update(request_id=f"r{n}", state=state, time_unix_s=1.0, model="m"))
            await store.flush(1)
            print(n, flush=True)

asyncio.run(main())
"""


@pytest.mark.system
async def test_kill_of_a_writer_leaves_a_readable_store(embedded, scheduler):
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WRITER, embedded.url, stdout=asyncio.subprocess.PIPE
    )
    assert writer.stdout is not None
    written = [int(await writer.stdout.readline()) for _ in range(50)]
    os.kill(writer.pid, signal.SIGKILL)
    await writer.communicate()
    for n in written:
        record = await scheduler.get(f"r{n}")
        assert record is not None
        assert (record.state, record.model) == (State.DISPATCHED, "m")
