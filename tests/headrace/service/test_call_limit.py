"""Which open calls a newer one ends."""

import asyncio

import pytest

from headrace.service.call_limit import CallLimit
from headrace.service.errors import ServiceError


async def open_call(limit):
    """A call that stays open until it is ended or cancelled."""
    is_open = asyncio.Event()

    async def stay():
        is_open.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(limit.run(stay()))
    await is_open.wait()
    return task


async def cancel(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_new_call_ends_the_oldest():
    limit = CallLimit(2)
    first, *others = [await open_call(limit) for _ in range(3)]
    with pytest.raises(ServiceError) as caught:
        await first
    assert caught.value.reason == "TOO_MANY_CALLS"
    assert len(limit) == 2
    await cancel(*others)
    assert not len(limit)


async def test_a_young_call_stays_open():
    limit = CallLimit(1, stay_s=1_000.0)
    calls = [await open_call(limit) for _ in range(3)]
    assert len(limit) == 3
    await cancel(*calls)
    assert not len(limit)


async def test_a_new_call_ends_all_that_are_too_many_and_old():
    limit = CallLimit(1, stay_s=1_000.0)
    old = [await open_call(limit) for _ in range(3)]
    limit._opened = dict.fromkeys(limit._opened, float("-inf"))
    new = await open_call(limit)
    ends = await asyncio.gather(*old, return_exceptions=True)
    assert {type(end) for end in ends} == {ServiceError}
    assert len(limit) == 1
    await cancel(new)
