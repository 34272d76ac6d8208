"""What waits for one router: merged, bounded, in order."""

import asyncio

import pytest

from headrace.vocabulary import RefusalReason
from scheduler.outbox import OutboxClosedError, RouterOutbox
from scheduler.updates import NotTaken, RouterUpdate
from tests.scheduler.test_updates import tokens_by_handle, update


async def test_what_was_pushed_while_nobody_took_comes_in_one_update():
    outbox = RouterOutbox(100)
    outbox.push(update({1: [5]}))
    outbox.push(update({1: [6]}))
    outbox.push(RouterUpdate(refusals=(NotTaken(4, RefusalReason.NO_WORKER, "none"),)))
    taken = await outbox.take()
    assert tokens_by_handle(taken) == {1: [5, 6]}
    assert [refusal.handle for refusal in taken.refusals] == [4]
    outbox.push(update({2: [7]}))
    assert tokens_by_handle(await outbox.take()) == {2: [7]}


async def test_taking_waits_for_something():
    outbox = RouterOutbox(100)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.push(update({1: [5]}))
    assert tokens_by_handle(await taking) == {1: [5]}


async def test_a_router_that_lets_too_much_wait_is_given_up():
    outbox = RouterOutbox(max_waiting_tokens=10)
    outbox.push(update({1: [0] * 10}))
    await outbox.take()
    assert not outbox._overflowed.is_set()
    outbox.push(update({1: [0] * 6}))
    outbox.push(update({1: [0] * 5}))
    outbox.push(update({1: [0] * 5}))
    await outbox.wait_overflow()
    assert not outbox._updates


async def test_a_closed_outbox_gives_what_it_has_and_then_says_so():
    outbox = RouterOutbox(100)
    outbox.push(update({1: [5]}))
    outbox.close()
    assert tokens_by_handle(await outbox.take()) == {1: [5]}
    with pytest.raises(OutboxClosedError):
        await outbox.take()
