"""Who leaves a crowd when others come."""

import asyncio

import pytest

from headrace.service.crowd import Crowd
from headrace.service.errors import ServiceError


async def come(crowd):
    """A task that stays in the crowd until it is told to leave, or cancelled."""
    inside = asyncio.Event()

    async def stay():
        async with crowd.place():
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(stay())
    await inside.wait()
    return task


async def leave(*tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_oldest_leaves_for_a_newcomer():
    crowd = Crowd(2)
    first, *others = [await come(crowd) for _ in range(3)]
    with pytest.raises(ServiceError) as caught:
        await first
    assert caught.value.reason == "TOO_MANY_CALLS"
    assert len(crowd) == 2
    await leave(*others)
    assert not len(crowd)


async def test_nobody_leaves_who_has_just_come():
    crowd = Crowd(1, stay_s=1_000.0)
    tasks = [await come(crowd) for _ in range(3)]
    assert len(crowd) == 3
    await leave(*tasks)
    assert not len(crowd)


async def test_all_that_are_too_many_and_old_leave_at_once():
    crowd = Crowd(1, stay_s=1_000.0)
    old = [await come(crowd) for _ in range(3)]
    crowd._inside = dict.fromkeys(crowd._inside, float("-inf"))
    newcomer = await come(crowd)
    ends = await asyncio.gather(*old, return_exceptions=True)
    assert {type(end) for end in ends} == {ServiceError}
    assert len(crowd) == 1
    await leave(newcomer)
