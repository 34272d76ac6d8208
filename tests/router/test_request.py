"""Streams are woken in turns, and what comes before a stream's turn joins its message."""

import asyncio

import numpy as np
import pytest

from router.core.fairness import FairShare
from router.request import Request, Spec, Timeline, Waker


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


async def test_a_few_are_woken_in_each_round_in_the_order_they_came():
    waker, streams = Waker(batch=2), [Stream() for _ in range(5)]
    for stream in streams:
        waker.add(stream)
    rounds = []
    for _ in range(4):
        rounds.append([stream.num_delivered for stream in streams])
        await asyncio.sleep(0)
    assert rounds == [[0] * 5, [1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [1] * 5]


async def test_it_rests_when_all_are_woken_and_begins_again():
    waker, stream = Waker(), Stream()
    for expected in (1, 2):
        waker.add(stream)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert stream.num_delivered == expected
        assert not waker._is_scheduled


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
    while len(order) < 2:  # noqa: ASYNC110 rounds of the loop are what is tested
        await asyncio.sleep(0)
    first.wake()
    first.wake()
    second.wake()
    await asyncio.gather(*tasks)
    assert order == ["1", "2", "1", "2"]
    assert not waker._due


async def test_a_stream_that_is_gone_is_not_woken(make_request):
    waker = Waker()
    request = make_request(waker)
    task = asyncio.create_task(request.news())
    await asyncio.sleep(0)
    request.wake()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert not waker._due
    request.wake()
    assert not waker._due
