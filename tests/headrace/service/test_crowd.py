"""Places in a crowd: who waits, who leaves, and that none is lost."""

import asyncio

import pytest

from headrace.service.crowd import Crowd
from headrace.service.errors import ServiceError


class Visitors:
    """Tasks that stay in a crowd until they are told to go."""

    def __init__(self, crowd):
        self._crowd = crowd
        self.inside = []
        self.tasks = {}
        self._exits = {}

    async def come(self, name):
        self._exits[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name))
        await settled()

    async def _visit(self, name):
        async with self._crowd.place():
            self.inside.append(name)
            await self._exits[name].wait()

    async def go(self, name):
        self._exits[name].set()
        await self.tasks[name]
        await settled()


async def settled():
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("patience_s", [0.0, 0.01])
async def test_the_oldest_leaves_for_a_newcomer(patience_s):
    crowd = Crowd(2, patience_s)
    visitors = Visitors(crowd)
    for name in "abc":
        await visitors.come(name)
    with pytest.raises(ServiceError) as caught:
        await visitors.tasks["a"]
    assert caught.value.reason == "TOO_MANY_CALLS"
    await settled()
    assert visitors.inside == ["a", "b", "c"]
    await visitors.go("b")
    await visitors.go("c")
    assert not len(crowd)


async def test_newcomers_wait_for_those_who_are_not_there_for_long():
    crowd = Crowd(1, 1_000.0)
    visitors = Visitors(crowd)
    for name in "abc":
        await visitors.come(name)
    assert visitors.inside == ["a"]
    await visitors.go("a")
    assert visitors.inside == ["a", "b"]
    await visitors.go("b")
    await visitors.go("c")
    assert not len(crowd)


async def test_nobody_leaves_for_a_newcomer_that_has_gone():
    crowd = Crowd(1, 1_000.0)
    visitors = Visitors(crowd)
    await visitors.come("a")
    await visitors.come("b")
    (scope,) = crowd._inside
    assert scope.when() is not None
    visitors.tasks["b"].cancel()
    await settled()
    assert scope.when() is None
    await visitors.go("a")
    assert not len(crowd)


async def test_a_place_that_was_given_to_somebody_who_leaves_goes_on():
    crowd = Crowd(1, 1_000.0)
    visitors = Visitors(crowd)
    for name in "abc":
        await visitors.come(name)
    # In one round of the loop: a gives its place to b, which is cancelled before it runs.
    visitors._exits["a"].set()
    await asyncio.sleep(0)
    visitors.tasks["b"].cancel()
    await settled()
    assert visitors.inside == ["a", "c"]
    await visitors.go("c")
    assert not len(crowd)
