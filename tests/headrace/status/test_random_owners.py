"""Routers and schedulers that lose, delay and repeat their writes at random, against a real Valkey.

Whatever arrives when, a request's journal is the beginning of one run's tokens, its epoch does not
fall, and its end stays. Runs do not agree here: each draws its own tokens beyond its start.
"""

import random
from array import array

import pytest

from headrace.status.records import Verdict
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from tests.headrace.status.journal_source import piece, update

pytestmark = pytest.mark.system

NUM_STEPS = 150


class Run:
    """One scheduler's run of the request, at one epoch."""

    def __init__(self, epoch, scheduler_id, tokens):
        self.epoch = epoch
        self.scheduler_id = scheduler_id
        self.tokens = tokens
        self.num_sent = len(tokens)

    def update(self, state, **more):
        return update(state, epoch=self.epoch, scheduler_id=self.scheduler_id, **more)


class World:
    """A request, its runs, and the writes that are on their way."""

    def __init__(self, seed, router, scheduler):
        self.random = random.Random(seed)
        self.router = router
        self.scheduler = scheduler
        self.runs = []
        self.under_way = []
        self.epoch = 0
        self.end = None

    async def begin(self):
        await self.router.apply(update(State.QUEUED, router_id="r0", router_incarnation="r0"))
        await self.dispatch(1, [], "r0")

    async def dispatch(self, epoch, tokens, router_id):
        """A new run; the router's own record of it may be lost."""
        run = Run(epoch, f"s{len(self.runs)}", list(tokens))
        self.runs.append(run)
        owner = {"router_id": router_id, "router_incarnation": router_id}
        told = update(State.DISPATCHED, epoch=epoch, scheduler_id=run.scheduler_id, **owner)
        self.under_way += [(self.router, told), (self.scheduler, run.update(State.RUNNING))]

    async def sample(self):
        run = self.random.choice(self.runs)
        run.tokens += [self.random.randrange(1000) for _ in range(self.random.randint(1, 3))]
        tokens = piece(run.num_sent, *run.tokens[run.num_sent :], epoch=run.epoch)
        run.num_sent = len(run.tokens)
        self.under_way.append((self.scheduler, tokens))

    async def finish(self):
        run = self.random.choice(self.runs)
        self.under_way.append((self.scheduler, run.update(State.STOPPED)))

    async def take_up(self):
        """A router claims the request and starts it from some of its tokens, or ends it."""
        found = await self.router.load("r1")
        name = f"r{len(self.runs)}"
        state = self.random.choices((State.QUEUED, State.ABORTED), (9, 1))[0]
        mine = await self.router.claim(found, state, router_id=name, router_incarnation=name)
        if mine is None or state is State.ABORTED or not mine.is_live:
            return
        tokens = array("i", mine.completions[0].token_ids)
        start = self.random.randint(0, len(tokens))
        await self.dispatch(mine.completions[0].record.epoch, tokens[:start], name)

    async def deliver(self):
        """One write arrives, out of turn at times, and is lost or comes twice at times."""
        if not self.under_way:
            return
        index = 0 if self.random.random() < 0.8 else self.random.randrange(len(self.under_way))
        store, item = self.under_way[index]
        fate = self.random.random()
        if fate > 0.1:
            del self.under_way[index]
        if fate < 0.95:
            outcomes = await store._backend.batches.evaluate([[item]])
            if (gap := outcomes.get(0)) is not None and gap.verdict is Verdict.GAP:
                run = next(r for r in self.runs if r.epoch == item.epoch)
                again = piece(gap.num_tokens, *run.tokens[gap.num_tokens :], epoch=run.epoch)
                assert not await store._backend.batches.evaluate([[again]])

    async def check(self):
        (completion,) = (await self.router.load("r1")).completions
        record = completion.record
        tokens = list(array("i", completion.token_ids))
        assert record.epoch >= self.epoch
        self.epoch = record.epoch
        assert any(run.tokens[: len(tokens)] == tokens for run in self.runs)
        if self.end is not None:
            assert (record.state, record.epoch) == self.end
        elif record.state.is_final:
            self.end = record.state, record.epoch
        # Nobody but the run of this epoch has written since.
        if record.scheduler_id and record.state is State.RUNNING:
            owner = next(run for run in self.runs if run.scheduler_id == record.scheduler_id)
            assert owner.epoch == record.epoch


@pytest.mark.parametrize("seed", range(8))
async def test_the_journal_is_always_the_beginning_of_one_run(embedded, seed):
    async with (
        StatusStore(embedded.url, Writer.ROUTER) as router,
        StatusStore(embedded.url, Writer.SCHEDULER) as scheduler,
    ):
        world = World(seed, router, scheduler)
        await world.begin()
        for _ in range(NUM_STEPS):
            (act,) = world.random.choices(
                (world.sample, world.deliver, world.take_up, world.finish), (4, 8, 1, 0.1)
            )
            await act()
            await world.check()
