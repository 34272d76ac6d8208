"""A task's share of its event loop."""

import asyncio

import pytest

from headrace.status.pacing import Pace, metered


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_burst_within_the_credit_is_not_followed_by_a_pause():
    pace = Pace(max_credit_s=0.5, max_pause_s=1000.0, clock=Clock())
    assert [pace.pause_s(0.25, 0.01) for _ in range(3)] == [0.0, 0.0, 25.0]


def test_work_takes_no_more_than_its_share():
    clock = Clock()
    pace = Pace(max_credit_s=0.5, max_pause_s=1000.0, clock=clock)
    spent_s = 0.0
    for cost_s in (0.1, 2.0, 0.0001, 0.3) * 100:
        spent_s += cost_s
        clock.now += cost_s
        clock.now += pace.pause_s(cost_s, 0.01)
    assert spent_s <= 0.01 * clock.now + 0.5


def test_a_long_pause_is_paid_in_parts():
    clock = Clock()
    pace = Pace(max_credit_s=0.0, max_pause_s=10.0, clock=clock)
    assert pace.pause_s(0.25, 0.01) == 10.0
    clock.now += 10.0
    assert pace.pause_s(0.0, 0.01) == 10.0
    clock.now += 10.0
    assert pace.pause_s(0.0, 0.01) == pytest.approx(5.0)


async def test_only_the_steps_of_the_coroutine_itself_are_counted():
    spent = Clock()

    async def work():
        spent.now += 1
        await asyncio.sleep(0)
        spent.now += 1
        return "done"

    async def another():
        spent.now += 100

    task = asyncio.create_task(another())
    assert await metered(work(), spent) == ("done", 2.0)
    assert task.done()


async def test_errors_and_cancellations_reach_the_coroutine():
    seen = []

    async def work():
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            seen.append("cancelled")
        raise ValueError("its own")

    task = asyncio.create_task(metered(work(), lambda: 0.0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(ValueError, match="its own"):
        await task
    assert seen == ["cancelled"]
