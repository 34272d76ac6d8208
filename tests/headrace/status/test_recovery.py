"""The journal, and taking a request up again, against a real Valkey."""

import asyncio
from array import array

import pytest

from headrace.status.records import Verdict
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from tests.headrace.status.journal_source import NOW, ListSource, piece, update

A = {"router_id": "a", "router_incarnation": "a1"}
B = {"router_id": "b", "router_incarnation": "b1"}


@pytest.fixture
async def router(embedded):
    async with StatusStore(embedded.url, Writer.ROUTER) as store:
        yield store


@pytest.fixture
async def scheduler(embedded):
    async with StatusStore(embedded.url, Writer.SCHEDULER) as store:
        store.source = ListSource()
        store.watch(store.source.superseded)
        running = asyncio.create_task(store.run())
        yield store
        running.cancel()
        await asyncio.wait([running])


async def dispatched(router, name="r1", **more):
    for state in (State.QUEUED, State.DISPATCHED):
        outcome = await router.apply(update(state, name, **{**A, **more}))
        assert outcome.verdict is Verdict.APPLIED


async def append(scheduler, *items):
    scheduler.source.items += items
    assert await scheduler.flush(10)


async def stored(store, request_id="r1"):
    found = await store.load(request_id)
    assert found is not None
    return found


async def claimed(store, state=State.QUEUED, owner=B, **more):
    found = await store.claim(await stored(store), state, **owner, **more)
    assert found is not None
    return found


def tokens_of(found, index=0):
    return list(array("i", found.completions[index].token_ids))


async def test_all_that_is_written_of_a_request_is_read_back(router, scheduler):
    await dispatched(router, spec=b"\x00spec\xff", tenant="t", num_completions=1)
    await append(
        scheduler,
        piece(0, 5, -1, logprobs=[b"\x00a", b"b"], prompt_logprobs=[b"p\xff", b"q"]),
        piece(2, 7, logprobs=[b"c"]),
        update(State.STOPPED, completion_tokens=3, stop_token_id=7, worker_incarnation="w1"),
    )
    found = await stored(router)
    (completion,) = found.completions
    assert found.spec == b"\x00spec\xff"
    assert list(found.prompt_logprobs) == [b"p\xff", b"q"]
    assert tokens_of(found) == [5, -1, 7]
    assert list(completion.logprobs) == [b"\x00a", b"b", b"c"]
    record = completion.record
    assert (record.state, record.stop_token_id, record.worker_incarnation) == (
        State.STOPPED,
        7,
        "w1",
    )
    assert completion.is_complete
    assert not found.is_live


async def test_an_unknown_request_is_not_loaded(router):
    for request_id in ("nobody", "r1#0", "no such id!"):
        assert await router.load(request_id) is None
        assert await router.records(request_id) == []


async def test_each_completion_has_a_record_and_a_journal(router, scheduler):
    for k in range(3):
        arrived = NOW + k * 1e-6
        await dispatched(router, f"r1#{k}", num_completions=3, create_time_unix_s=arrived)
        tokens = piece(0, k, k, name=f"r1#{k}", create_time_unix_s=arrived)
        await append(scheduler, tokens)
    found = await stored(router)
    assert [c.record.request_id for c in found.completions] == ["r1#0", "r1#1", "r1#2"]
    assert [tokens_of(found, k) for k in range(3)] == [[0, 0], [1, 1], [2, 2]]


async def test_tokens_after_a_gap_are_asked_for_again(router, scheduler):
    await dispatched(router)
    scheduler.source.known["r1"] = [1, 2, 3, 4]
    await append(scheduler, piece(2, 3), update(State.RUNNING))
    assert tokens_of(await stored(router)) == [1, 2, 3, 4]


async def test_an_end_waits_for_tokens_that_are_asked_for_again(router, scheduler):
    await dispatched(router)
    late = [piece(2, 3), update(State.STOPPED, completion_tokens=4)]
    outcomes = await scheduler._backend.batches.evaluate([late])
    assert [outcomes[i].verdict for i in range(2)] == [Verdict.GAP, Verdict.EARLY]
    assert (await stored(router)).is_live
    scheduler.source.known["r1"] = [1, 2, 3, 4]
    await append(scheduler, *late)
    (completion,) = (await stored(router)).completions
    assert (completion.record.state, completion.is_complete) == (State.STOPPED, True)


async def test_a_journal_that_its_writer_no_longer_knows_is_seen_to_be_incomplete(
    router, scheduler
):
    await dispatched(router)
    await append(scheduler, piece(2, 3), update(State.STOPPED, completion_tokens=3))
    (completion,) = (await stored(router)).completions
    assert completion.num_tokens == 0
    assert not completion.is_complete


async def test_tokens_that_are_written_twice_are_kept_once(router, scheduler):
    await dispatched(router)
    first = piece(0, 1, 2, logprobs=[b"1", b"2"])
    await append(scheduler, first, piece(2, 3, logprobs=[b"3"]))
    await append(scheduler, first, piece(1, 2, 3, 4, logprobs=[b"2", b"3", b"4"]))
    (completion,) = (await stored(router)).completions
    assert list(array("i", completion.token_ids)) == [1, 2, 3, 4]
    assert list(completion.logprobs) == [b"1", b"2", b"3", b"4"]


@pytest.mark.parametrize("position", [0, 1, 2, 3])
async def test_a_new_epoch_keeps_nothing_of_the_older_beyond_its_start(router, scheduler, position):
    await dispatched(router)
    await append(scheduler, piece(0, 1, 2, 3, logprobs=[b"1", b"2", b"3"]))
    await claimed(router)
    await append(scheduler, piece(position, 9, epoch=2, logprobs=[b"9"]))
    (completion,) = (await stored(router)).completions
    assert list(array("i", completion.token_ids)) == [*range(1, position + 1), 9]
    assert len(completion.logprobs) == position + 1


async def test_a_claim_takes_every_living_completion_to_the_next_epoch(router, scheduler):
    for k in range(2):
        await dispatched(router, f"r1#{k}", num_completions=2)
    await append(scheduler, update(State.STOPPED, "r1#0"))
    mine = await claimed(router, detail="taken up", is_recovery=True)
    assert mine == await stored(router)
    first, second = (c.record for c in mine.completions)
    assert (first.state, first.epoch, first.router_id) == (State.STOPPED, 1, "a")
    assert (second.state, second.epoch, second.router_id) == (State.QUEUED, 2, "b")
    assert (second.num_recoveries, second.detail) == (1, "taken up")


async def test_of_two_claimers_exactly_one_wins(router, embedded):
    await dispatched(router)
    async with StatusStore(embedded.url, Writer.ROUTER) as other:
        for _ in range(20):
            seen = await stored(router)
            results = await asyncio.gather(
                router.claim(seen, State.QUEUED, **A), other.claim(seen, State.QUEUED, **B)
            )
            (winner,) = [result for result in results if result is not None]
            assert await stored(router) == winner


async def test_a_claim_fails_when_the_request_has_ended_meanwhile(router, scheduler):
    await dispatched(router)
    seen = await stored(router)
    await append(scheduler, update(State.STOPPED))
    assert await router.claim(seen, State.ABORTED, **B) is None
    ended = await stored(router)
    assert await router.claim(ended, State.ABORTED, **B) == ended


async def test_an_abort_wins_against_all_that_is_written_late(router, scheduler):
    await dispatched(router)
    await claimed(router, State.ABORTED)
    late = [update(State.RUNNING), piece(0, 1), update(State.STOPPED), piece(0, 1, epoch=1)]
    await append(scheduler, *late)
    assert set(scheduler.source.refused) == {("r1", 1, State.ABORTED)}
    # Its router has sent it again, without having heard of the abort.
    await append(scheduler, update(State.RUNNING, epoch=3))
    await append(scheduler, piece(0, 1, epoch=4))
    assert set(scheduler.source.refused) == {("r1", e, State.ABORTED) for e in (1, 3, 4)}
    assert (await router.apply(update(State.QUEUED, epoch=3, **A))).is_superseded
    assert (await router.apply(update(State.DISPATCHED, epoch=1, **A))).is_superseded
    found = await stored(router)
    assert found.completions[0].record.state is State.ABORTED
    assert tokens_of(found) == []


async def test_a_lost_owner_of_the_same_epoch_is_refused(router, scheduler, embedded):
    await dispatched(router)
    await claimed(router)
    # The first router raises the epoch itself: its scheduler is lost to it, too.
    for state in (State.QUEUED, State.DISPATCHED):
        for epoch in (2, 3):
            outcome = await router.apply(update(state, epoch=epoch, **A))
            assert outcome.verdict is Verdict.STALE
    await router.apply(update(State.DISPATCHED, epoch=2, scheduler_id="s2", **B))
    for state in (State.RUNNING, State.STOPPED):
        outcome = await scheduler.apply(update(state, epoch=2, scheduler_id="s1"))
        assert outcome.verdict is Verdict.STALE
    running = await scheduler.apply(update(State.RUNNING, epoch=2, scheduler_id="s2"))
    assert running.verdict is Verdict.APPLIED
    again = await scheduler.apply(update(State.RUNNING, epoch=2, scheduler_id="s1"))
    assert again.verdict is Verdict.STALE


async def test_a_router_goes_on_with_its_own_request_behind_a_lost_scheduler(router, scheduler):
    await dispatched(router, scheduler_id="s1")
    for state in (State.QUEUED, State.DISPATCHED):
        outcome = await router.apply(update(state, epoch=2, **A))
        assert outcome.verdict is Verdict.APPLIED
    running = await scheduler.apply(update(State.RUNNING, epoch=2, scheduler_id="s2"))
    assert running.verdict is Verdict.APPLIED


async def test_a_completion_that_was_never_recorded_is_claimed_with_the_others(router):
    await dispatched(router, "r1#0", num_completions=2)
    seen = await stored(router)
    assert [c.record.epoch for c in seen.completions] == [1, 0]
    mine = await claimed(router)
    assert [c.record.epoch for c in mine.completions] == [2, 1]
    late = await router.apply(update(State.QUEUED, "r1#1", create_time_unix_s=NOW + 1e-6, **A))
    assert late.verdict is Verdict.STALE


async def test_an_id_that_is_used_again_has_nothing_of_the_earlier_request(router, scheduler):
    for k in range(2):
        await dispatched(router, f"r1#{k}", num_completions=2, spec=b"old")
        await append(
            scheduler,
            piece(0, 1, name=f"r1#{k}", logprobs=[b"1"], prompt_logprobs=[b"p"]),
            update(State.STOPPED, f"r1#{k}"),
        )
    await router.apply(update(State.QUEUED, create_time_unix_s=NOW + 1, num_completions=1))
    found = await stored(router)
    assert (found.spec, found.prompt_logprobs, len(found.completions)) == (b"", [], 1)
    assert tokens_of(found) == []
    # The end of the earlier request is still on its way; nobody ends the new one for that.
    await append(scheduler, update(State.ABORTED))
    assert scheduler.source.refused == []


async def test_a_rejection_of_a_repeated_call_does_not_hide_the_admitted_request(router):
    await router.apply(update(State.REJECTED, create_time_unix_s=NOW + 1.0))
    queued = update(State.QUEUED, spec=b"spec", **A)
    assert (await router.apply(queued)).verdict is Verdict.APPLIED
    assert (await stored(router)).spec == b"spec"


async def test_a_rejection_of_a_repeated_call_does_not_wipe_what_has_ended(router, scheduler):
    await dispatched(router, spec=b"spec")
    await append(scheduler, piece(0, 1, 2))
    (record,) = await router.records("r1")
    assert (record.completion_tokens, record.journal_tokens) == (0, 2)
    await scheduler.apply(update(State.STOPPED))
    rejected = update(State.REJECTED, create_time_unix_s=NOW + 1.0)
    assert (await router.apply(rejected)).verdict is Verdict.ILLEGAL
    assert tokens_of(await stored(router)) == [1, 2]


async def test_everything_of_a_request_expires_soon_after_its_last_completion(embedded, client):
    async with (
        StatusStore(embedded.url, Writer.ROUTER, live_ttl_s=100, finished_ttl_s=5) as router,
        StatusStore(embedded.url, Writer.SCHEDULER, live_ttl_s=100, finished_ttl_s=5) as scheduler,
    ):
        scheduler.source = ListSource()
        running = asyncio.create_task(scheduler.run())

        async def ttls():
            keys = [key async for key in client.scan_iter("headrace:2:{r1}:*")]
            return [await client.pttl(key) for key in keys]

        for k in range(2):
            await dispatched(router, f"r1#{k}", num_completions=2, spec=b"s")
            tokens = piece(0, 1, name=f"r1#{k}", logprobs=[b"1"], prompt_logprobs=[b"p"])
            await append(scheduler, tokens)
        await append(scheduler, update(State.STOPPED, "r1#0"))
        assert len(await ttls()) == 8
        assert min(await ttls()) > 5_000
        await append(scheduler, update(State.STOPPED, "r1#1"))
        assert 0 < max(await ttls()) <= 5_000
        running.cancel()
        await asyncio.wait([running])
