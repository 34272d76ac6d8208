"""Streams are woken in turns, and what comes before a stream's turn joins its message."""

import asyncio
import time

import numpy as np
import pytest

from router.core.fairness import FairShare
from router.request import Request, Spec, Timeline
from router.waker import Waker


@pytest.fixture
def make_request():
    def make(waker):
        return Request(
            spec=Spec(request_id="r", model="m", sampling=None),
            prompt_token_ids=np.ones(1, np.int32),
            prompt_text="",
            max_tokens=1,
            arrived_unix_s=0.0,
            timeline=Timeline(arrived=0.0),
            number=1,
            account=FairShare().account(""),
            waker=waker,
        )

    return make


class Stream:
    """Counts how often it is let go on."""

    def __init__(self):
        self.num_delivered = 0

    def deliver(self):
        self.num_delivered += 1


async def until(condition):
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 turns of the loop are what is tested
            await asyncio.sleep(0)


async def test_a_few_are_woken_in_each_turn_of_the_loop_in_the_order_they_came():
    waker, streams = Waker(batch=2), [Stream() for _ in range(5)]
    for stream in streams:
        waker.add(stream)
    turns = []
    for _ in range(4):
        turns.append([stream.num_delivered for stream in streams])
        await asyncio.sleep(0)
    assert turns == [[0] * 5, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1] * 5]


async def test_who_comes_during_a_round_has_its_turn_in_the_next_after_a_rest():
    waker, slow, late = Waker(), Stream(), Stream()
    rested = []

    def take_long():
        time.sleep(0.003)
        waker.add(late)
        rested.append(asyncio.get_running_loop().time())

    slow.deliver = take_long
    late.deliver = lambda: rested.append(asyncio.get_running_loop().time())
    waker.add(slow)
    await until(lambda: len(rested) == 2)
    assert 0.005 < rested[1] - rested[0] < 1.0


async def test_a_rest_is_never_long():
    waker, slow, late = Waker(), Stream(), Stream()
    times = []

    def take_long():
        time.sleep(0.1)
        waker.add(late)
        times.append(asyncio.get_running_loop().time())

    slow.deliver = take_long
    late.deliver = lambda: times.append(asyncio.get_running_loop().time())
    waker.add(slow)
    await until(lambda: len(times) == 2)
    assert times[1] - times[0] < 0.09


async def test_there_is_no_rest_when_nobody_waits_at_the_end_of_a_round():
    waker, slow, late = Waker(), Stream(), Stream()
    slow.deliver = lambda: time.sleep(0.01)
    waker.add(slow)
    await until(lambda: not waker._is_scheduled)
    waker.add(late)
    await asyncio.sleep(0)
    assert late.num_delivered == 1


async def test_it_stops_when_all_are_woken_and_begins_again():
    waker, stream = Waker(), Stream()
    for expected in (1, 2):
        waker.add(stream)
        await until(lambda: not waker._is_scheduled)
        assert stream.num_delivered == expected


async def test_a_request_with_news_waits_for_its_turn_once(make_request):
    waker = Waker(batch=1)
    first, second = make_request(waker), make_request(waker)
    order = []

    async def stream(name, request):
        for _ in range(2):
            await request.news()
            order.append(name)

    first.wake()
    second.wake()
    tasks = [asyncio.create_task(stream("1", first)), asyncio.create_task(stream("2", second))]
    await until(lambda: len(order) == 2)
    first.wake()
    first.wake()
    second.wake()
    await asyncio.gather(*tasks)
    assert order == ["1", "2", "1", "2"]
    assert not waker._next


async def test_a_stream_that_is_gone_is_not_woken(make_request):
    waker = Waker()
    request = make_request(waker)
    task = asyncio.create_task(request.news())
    await asyncio.sleep(0)
    request.wake()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert not waker._next
    request.wake()
    assert not waker._next
