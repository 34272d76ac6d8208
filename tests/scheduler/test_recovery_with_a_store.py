"""Requests that are taken up from a real store: their tokens there, and who may write them."""

import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from headrace.service.columns import pack_int32, unpack_int32
from headrace.status.embedded import EmbeddedStore
from headrace.status.records import Stored, Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from headrace.v1 import common_pb2
from tests.headrace.waiting import eventually
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.test_main import router_at, scheduler_process

pytestmark = pytest.mark.system

PROMPT = [11, 12, 13, 14, 15]
NUM_TOKENS = 60


@pytest.fixture
async def worker() -> AsyncIterator[FakeGpuWorker]:
    worker = FakeGpuWorker()
    await worker.start()
    yield worker
    await worker.kill()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with EmbeddedStore() as embedded:
        yield embedded.url


async def write(store: StatusStore, request_id: str, state: State, epoch: int = 1) -> None:
    """Write what a router writes of a request."""
    await store.apply(
        Update(
            request_id=request_id,
            state=state,
            epoch=epoch,
            time_unix_s=time.time(),
            create_time_unix_s=1.0,
            spec=b"spec",
            router_id=f"r{epoch - 1}",
            router_incarnation=str(epoch),
        )
    )


async def dispatch(store: StatusStore, request_id: str) -> None:
    for state in (State.QUEUED, State.DISPATCHED):
        await write(store, request_id, state)


async def loaded(store: StatusStore, request_id: str) -> Stored:
    stored = await store.load(request_id)
    assert stored is not None
    return stored


def tokens_of(stored: Stored) -> list[int]:
    return unpack_int32(stored.completions[0].token_ids, "token_ids").tolist()


async def claim(store: StatusStore, request_id: str, state: State = State.QUEUED) -> Stored:
    """The request once another router has claimed it."""
    stored = await loaded(store, request_id)
    after = await store.claim(stored, state, router_id="r1", router_incarnation="2")
    assert after is not None
    if state is State.QUEUED:
        await write(store, request_id, State.DISPATCHED, epoch=2)
    return await loaded(store, request_id)


async def has_kept(store: StatusStore, request_id: str, num_tokens: int) -> None:
    """Wait until the store has so many tokens."""

    async def are_kept() -> bool:
        return (await loaded(store, request_id)).completions[0].num_tokens >= num_tokens

    await eventually(are_kept)


async def is_kept_whole(store: StatusStore, request_id: str, epoch: int) -> Stored:
    """Wait until the store has a request's end and all its tokens."""

    async def is_complete() -> bool:
        return (await loaded(store, request_id)).completions[0].is_complete

    await eventually(is_complete)
    stored = await loaded(store, request_id)
    record = stored.completions[0].record
    assert (record.state, record.epoch) == (State.LENGTH_CAPPED, epoch)
    assert tokens_of(stored) == expected_tokens(PROMPT, NUM_TOKENS)
    return stored


def resumed(request_id: str, token_ids: list[int]) -> dict[str, object]:
    """Fields of a submission that takes a request up with some of its tokens."""
    generated = pack_int32(np.array(token_ids, dtype=np.int32))
    return {"request_id": request_id, "epoch": 2, "generated_token_ids": generated}


async def test_another_scheduler_goes_on_from_the_tokens_of_a_killed_one(worker, url, tmp_path):
    other_worker = FakeGpuWorker("w1")
    await other_worker.start()
    environ = {"HEADRACE_SCHEDULER_STORE_URL": url}
    async with StatusStore(url, Writer.ROUTER) as store:
        (tmp_path / "s0").mkdir()
        (tmp_path / "s1").mkdir()
        async with scheduler_process(worker, tmp_path / "s0", environ=environ) as (one, address):
            await dispatch(store, "x")
            async with router_at(address) as router:
                await router.submit(PROMPT, NUM_TOKENS, request_id="x")
                worker.hold()
                await worker.release(15)
                await has_kept(store, "x", 10)
                one.kill()
                await one.wait()
        await worker.release()
        flags = ("--scheduler-id", "s1")
        process = scheduler_process(other_worker, tmp_path / "s1", *flags, environ=environ)
        async with process as (_, address), router_at(address) as router:
            kept = tokens_of(await claim(store, "x"))
            assert 10 <= len(kept) < NUM_TOKENS
            handle = await router.submit(PROMPT, NUM_TOKENS, **resumed("x", kept))
            (new,) = await router.finished(handle)
            assert kept + new == expected_tokens(PROMPT, NUM_TOKENS)
            stored = await is_kept_whole(store, "x", epoch=2)
            record = stored.completions[0].record
            assert (record.scheduler_id, record.worker_id) == ("s1", "w1")
    await other_worker.kill()


async def test_a_router_that_claims_a_request_gets_it_with_its_kv(worker, url, tmp_path):
    environ = {"HEADRACE_SCHEDULER_STORE_URL": url}
    async with (
        StatusStore(url, Writer.ROUTER) as store,
        scheduler_process(worker, tmp_path, environ=environ) as (_, address),
        router_at(address) as one,
        router_at(address) as other,
    ):
        await dispatch(store, "x")
        first = await one.submit(PROMPT, NUM_TOKENS, request_id="x")
        worker.hold()
        await worker.release(10)
        await has_kept(store, "x", 5)
        kept = tokens_of(await claim(store, "x"))
        # The next tokens are refused, and the scheduler knows that the request has moved.
        await worker.release(2)
        await one.wait_for(lambda: one.received[first].has_moved)
        taken = await other.submit(PROMPT, NUM_TOKENS, **resumed("x", kept[:3]))
        await worker.release()
        assert await other.finished(taken) == [expected_tokens(PROMPT, NUM_TOKENS)[3:]]
        await is_kept_whole(store, "x", epoch=2)
        placed = [request.request_id for plan in worker.plans for request in plan.row_requests]
        assert placed == ["x"]


async def test_a_request_aborted_in_the_store_ends_for_its_router(worker, url, tmp_path):
    environ = {"HEADRACE_SCHEDULER_STORE_URL": url}
    async with (
        StatusStore(url, Writer.ROUTER) as store,
        scheduler_process(worker, tmp_path, environ=environ) as (_, address),
        router_at(address) as router,
    ):
        await dispatch(store, "x")
        handle = await router.submit(PROMPT, NUM_TOKENS, request_id="x")
        worker.hold()
        await worker.release(10)
        await has_kept(store, "x", 5)
        await claim(store, "x", State.ABORTED)
        await worker.release(2)
        await router.wait_for(lambda: router.received[handle].finished is not None)
        reason = router.received[handle].finished.reason
        assert reason == common_pb2.FINISH_REASON_ABORTED
        record = (await loaded(store, "x")).completions[0].record
        assert record.state is State.ABORTED
        await worker.release()
