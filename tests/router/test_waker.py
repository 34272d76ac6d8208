"""Streams are woken in turns, and what comes before a stream's turn joins its message."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from router.core.fairness import FairShare
from router.request import ClientRequest, Spec, Timeline
from router.waker import MAX_REST_S, Waker


@pytest.fixture
def make_request():
    def make(waker):
        return ClientRequest(
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
        self.last_round = -1
        self.num_delivered = 0

    def deliver(self):
        self.num_delivered += 1


async def until(condition):
    async with asyncio.timeout(60):
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


class Busy(Stream):
    """Takes long over its first turn, by the loop's clock, and then wants another at once."""

    def __init__(self, waker, takes_s):
        super().__init__()
        self.waker = waker
        self.takes_s = takes_s

    def deliver(self):
        super().deliver()
        if self.num_delivered == 1:
            loop = asyncio.get_running_loop()
            before = loop.time
            loop.time = lambda: before() + self.takes_s
            self.waker.add(self)


@pytest.fixture
async def rests(monkeypatch):
    """The rests that wakers have asked the loop for, which it does not wait for."""
    loop, asked = asyncio.get_running_loop(), []

    def call_later(delay_s, callback):
        asked.append(delay_s)
        loop.call_soon(callback)

    monkeypatch.setattr(loop, "call_later", call_later)
    monkeypatch.setattr(loop, "time", loop.time)
    return asked


async def rest_after(takes_s, rests):
    waker = Waker()
    busy = Busy(waker, takes_s)
    waker.add(busy)
    while busy.num_delivered < 2:  # noqa: ASYNC110 turns of the loop are what is tested
        await asyncio.sleep(0)
    return rests


async def test_there_is_a_rest_when_a_stream_is_back_before_its_round_is_over(rests):
    [rest_s] = await rest_after(0.003, rests)
    assert 0.006 <= rest_s <= MAX_REST_S


async def test_a_rest_is_never_long(rests):
    assert await rest_after(0.1, rests) == [MAX_REST_S]


async def test_there_is_no_rest_for_those_who_are_new_in_a_round(rests):
    waker, late = Waker(), Stream()
    slow = Busy(waker, 0.01)
    slow.waker = SimpleNamespace(add=lambda _: waker.add(late))
    waker.add(slow)
    for _ in range(4):
        await asyncio.sleep(0)
    assert late.num_delivered == 1
    assert rests == []


async def test_it_stops_when_all_are_woken_and_begins_again():
    waker, stream = Waker(), Stream()
    for expected in (1, 2):
        waker.add(stream)
        await until(lambda: not waker._is_scheduled)
        assert stream.num_delivered == expected


class Broken(Stream):
    """Fails whenever it is woken."""

    def deliver(self):
        super().deliver()
        raise RuntimeError("broken")


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_a_stream_whose_delivery_fails_holds_up_no_other(position):
    failures = []
    asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
    waker, streams = Waker(batch=2), [Stream(), Stream()]
    streams.insert(position, Broken())
    for expected in (1, 2):
        for stream in streams:
            waker.add(stream)
        await until(lambda: not waker._is_scheduled)
        assert [stream.num_delivered for stream in streams] == [expected] * 3
    assert [str(failure["exception"]) for failure in failures] == ["broken"] * 2


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
