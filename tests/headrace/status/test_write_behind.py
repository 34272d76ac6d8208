"""Recording without waiting: with a real store that goes away, and with a scripted one."""

import asyncio
from contextlib import asynccontextmanager

from headrace.status import write_behind
from headrace.status.records import Update, Verdict, WriteOutcome
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from headrace.status.write_behind import Batch, WriteBehind


def update(state, request_id="r1", epoch=1, **known):
    return Update(request_id=request_id, state=state, epoch=epoch, time_unix_s=1.0, **known)


@asynccontextmanager
async def running(behind):
    task = asyncio.create_task(behind.run())
    try:
        yield behind
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class ScriptedStore:
    """Answers batches in turn, the last answer for ever; keeps what was written."""

    def __init__(self, *answers: Batch) -> None:
        self._answers = list(answers) or [Batch()]
        self.written: list[list[tuple[str, State]]] = []

    async def write(self, chains):
        if chains:
            self.written.append([(u.request_id, u.state) for chain in chains for u in chain])
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def early(*positions):
    return Batch(outcomes=dict.fromkeys(positions, WriteOutcome(Verdict.EARLY)))


def behind(store, *, max_completions=100, max_bytes=1000, clock=lambda: 0.0, **more):
    return WriteBehind(
        store.write, max_completions=max_completions, max_bytes=max_bytes, clock=clock, **more
    )


async def test_updates_of_both_writers_arrive_in_order_whoever_is_first(embedded):
    router = StatusStore(embedded.url, Writer.ROUTER)
    scheduler = StatusStore(embedded.url, Writer.SCHEDULER)
    async with router, scheduler, running(scheduler):
        for state in (State.RUNNING, State.PREEMPTED, State.RUNNING, State.LENGTH_CAPPED):
            scheduler.record(update(state, completion_tokens=4))
        assert not await scheduler.flush(0.1)
        assert scheduler.is_durable
        async with running(router):
            router.record(update(State.QUEUED, model="m"))
            router.record(update(State.DISPATCHED))
            assert await router.flush(5)
        assert await scheduler.flush(5)
        record = await router.get("r1")
        assert record is not None
        assert (record.state, record.model) == (State.LENGTH_CAPPED, "m")
        assert record.completion_tokens == 4


async def test_what_is_recorded_close_together_is_written_together(monkeypatch):
    monkeypatch.setattr(write_behind, "_BATCH_GAP_S", 0.3)
    store = ScriptedStore()
    async with running(behind(store)) as writer:
        for number in range(4):
            writer.put(update(State.QUEUED, request_id=f"r{number}"))
            await asyncio.sleep(0)
        assert await writer.flush(5)
    assert [len(batch) for batch in store.written] == [1, 3]


async def test_recording_goes_on_when_the_store_dies_and_catches_up(embedded):
    async with StatusStore(embedded.url, Writer.ROUTER) as store, running(store):
        store.record(update(State.QUEUED))
        assert await store.flush(5)
        assert store.is_durable
        process = embedded._process
        process.kill()
        await process.wait()
        store.record(update(State.DISPATCHED))
        store.record(update(State.QUEUED, request_id="r2"))
        assert await store.flush(10)
        assert store.is_durable
        first, second = await store.get("r1"), await store.get("r2")
        assert first is not None
        assert second is not None
        assert (first.state, second.state) == (State.DISPATCHED, State.QUEUED)


async def test_a_store_that_is_away_is_not_durable_and_is_found_again(monkeypatch):
    monkeypatch.setattr(write_behind, "_FIRST_BACKOFF_S", 0.001)
    store = ScriptedStore(Batch(failure="gone"), Batch(failure="gone"), Batch())
    async with running(behind(store)) as queue:
        queue.put(update(State.QUEUED))
        assert not queue.is_healthy
        assert await queue.flush(5)
        assert queue.is_healthy
    assert store.written == [[("r1", State.QUEUED)]] * 3


async def test_what_never_becomes_possible_is_dropped_after_a_while():
    store = ScriptedStore(early(0))
    async with running(behind(store, clock=lambda: 2.0 * len(store.written))) as queue:
        queue.put(update(State.RUNNING))
        assert await queue.flush(5)
        assert queue.num_refused == 1
    assert len(store.written) == 4


async def test_only_what_follows_an_early_update_is_written_again():
    store = ScriptedStore(early(1, 2), Batch())
    queue = behind(store)
    for state in (State.QUEUED, State.DISPATCHED, State.ABORTED):
        queue.put(update(state))
    queue.put(update(State.QUEUED, request_id="r2"))
    async with running(queue):
        assert await queue.flush(5)
    assert store.written[1:] == [[("r1", State.DISPATCHED), ("r1", State.ABORTED)]]


async def test_newer_updates_queue_behind_those_that_are_written_again():
    queue = behind(store := ScriptedStore())
    release = asyncio.Event()
    entered = asyncio.Event()

    async def slow(chains):
        if not entered.is_set():
            entered.set()
            await release.wait()
            return Batch(failure="gone")
        return await store.write(chains)

    queue._write = slow
    queue.put(update(State.QUEUED))
    async with running(queue):
        await entered.wait()
        queue.put(update(State.DISPATCHED))
        release.set()
        assert await queue.flush(5)
    assert store.written == [[("r1", State.QUEUED), ("r1", State.DISPATCHED)]]


async def test_the_queue_is_bounded_and_counts_what_it_drops():
    queue = behind(store := ScriptedStore(), max_completions=2)
    for n in range(5):
        queue.put(update(State.QUEUED, request_id=f"r{n}"))
    queue.put(update(State.DISPATCHED, request_id="r0"))
    assert queue.num_refused == 3
    async with running(queue):
        assert await queue.flush(5)
    ids = {request_id for batch in store.written for request_id, _ in batch}
    assert ids == {"r0", "r1"}


async def test_flapping_while_nobody_looks_stays_short():
    queue = behind(store := ScriptedStore())
    queue.put(update(State.RUNNING, worker_id="w", completion_tokens=1))
    for n in range(2, 100, 2):
        lost = State.PAUSED if n % 4 else State.PREEMPTED
        queue.put(update(lost, completion_tokens=n))
        queue.put(update(State.RUNNING, completion_tokens=n + 1))
    (merged,) = queue._queue._chains["r1"].items
    assert (merged.state, merged.worker_id) == (State.RUNNING, "w")
    assert merged.completion_tokens == 99
    async with running(queue):
        assert await queue.flush(5)
    assert len(store.written) == 1


async def test_refused_credentials_end_the_writing():
    queue = behind(ScriptedStore(Batch(is_fatal=True)))
    queue.put(update(State.QUEUED))
    await asyncio.wait_for(queue.run(), 5)
    queue.put(update(State.QUEUED, request_id="r2"))
    assert not queue.is_healthy
    assert not await queue.flush(0.1)
    assert queue.num_refused == 2


async def test_many_requests_go_out_in_few_batches(monkeypatch):
    monkeypatch.setattr(write_behind, "_MAX_BATCH_COMPLETIONS", 50)
    num_requests = 2000
    queue = behind(store := ScriptedStore(), max_completions=num_requests)
    for n in range(num_requests):
        queue.put(update(State.QUEUED, request_id=f"r{n}"))
    async with running(queue):
        assert await queue.flush(5)
    assert len(store.written) == 2000 / 50
    assert sum(map(len, store.written)) == num_requests


async def test_a_spec_that_does_not_fit_is_left_out_of_its_record():
    kept = []

    async def write(chains):
        kept.extend(item.spec for chain in chains for item in chain)
        return Batch()

    queue = WriteBehind(write, max_completions=10, max_bytes=5, clock=lambda: 0.0)
    for name in ("r1", "r2"):
        queue.put(update(State.QUEUED, request_id=name, spec=b"spec"))
    async with running(queue):
        assert await queue.flush(5)
        assert queue._queue.num_bytes == 0
    assert kept == [b"spec", None]


async def test_what_was_written_just_before_a_failure_is_written_again(monkeypatch):
    monkeypatch.setattr(write_behind, "_FIRST_BACKOFF_S", 0.001)
    store = ScriptedStore()
    times = [0.0]
    async with running(behind(store, clock=lambda: times[-1])) as queue:
        for number in range(3):
            times.append(2.0 * number)
            queue.put(update(State.QUEUED, request_id=f"r{number}"))
            assert await queue.flush(5)
        store._answers = [Batch(failure="gone"), Batch()]
        queue.put(update(State.DISPATCHED, request_id="r2"))
        assert await queue.flush(5)
    *_, failed, repeated = store.written
    assert failed == [("r2", State.DISPATCHED)]
    # In order, and nothing that is older than a few seconds.
    assert [entry for entry in repeated if entry[0] == "r2"] == [
        ("r2", State.QUEUED),
        ("r2", State.DISPATCHED),
    ]
    assert {name for name, _ in repeated} == {"r1", "r2"}


async def test_what_is_written_again_is_not_written_a_third_time(monkeypatch):
    monkeypatch.setattr(write_behind, "_FIRST_BACKOFF_S", 0.001)
    store = ScriptedStore()
    async with running(behind(store)) as queue:
        queue.put(update(State.QUEUED, request_id="r0"))
        assert await queue.flush(5)
        for number in range(1, 5):
            store._answers = [Batch(failure="gone"), Batch()]
            queue.put(update(State.QUEUED, request_id=f"r{number}"))
            assert await queue.flush(5)
    assert sum(("r0", State.QUEUED) in batch for batch in store.written) == 2
