"""Routers, workers and the store come and go at random moments: every token comes once."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from headrace.service.columns import pack_int32
from headrace.v1 import common_pb2, scheduler_pb2
from scheduler.config import PoolSettings, SchedulerSettings
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.fake_store import FakeStore
from tests.scheduler.harness import (
    FakeRouter,
    RunningScheduler,
    router_to,
    running_scheduler,
    until,
)

NUM_TOKENS = 60
NUM_OPERATIONS = 60


class Call:
    """One request as its client sees it, through whichever router has it."""

    def __init__(self, number: int) -> None:
        self.request_id = f"x{number}"
        self.prompt = [20 + number, 30, 40 + number]
        self.expected = expected_tokens(self.prompt, NUM_TOKENS)
        self.epoch = 0
        # Tokens known under earlier epochs.
        self.num_known = 0
        self.router: FakeRouter | None = None
        self.handle = 0
        self.is_cancelled = False

    def read(self) -> None:
        """Check what has come so far; the next router starts from there."""
        if self.router is None:
            return
        received = self.router.received[self.handle]
        if received.refusal is not None:
            assert received.refusal.reason == scheduler_pb2.REFUSAL_REASON_NO_WORKER
            self.router = None
            return
        token_ids = received.token_ids
        assert token_ids == self.expected[self.num_known :][: len(token_ids)]

    @property
    def num_received(self) -> int:
        new = 0 if self.router is None else len(self.router.received[self.handle].token_ids)
        return self.num_known + new

    @property
    def is_finished(self) -> bool:
        return self.router is not None and self.router.received[self.handle].finished is not None

    def leave(self) -> None:
        """The router is lost, with what was on the way to it."""
        self.read()
        self.num_known, self.router = self.num_received, None

    async def submit(self, router: FakeRouter, num_known: int) -> None:
        """Let a router take the request up from some of the tokens."""
        self.num_known, self.router = num_known, router
        known = np.array(self.expected[:num_known], dtype=np.int32)
        self.handle = await router.submit(
            self.prompt,
            NUM_TOKENS,
            request_id=self.request_id,
            epoch=self.epoch,
            generated_token_ids=pack_int32(known),
        )


class Chaos:
    """Operations at random moments on two workers, three routers, a store and some requests."""

    def __init__(
        self, seed: int, scheduler: RunningScheduler, store: FakeStore, stack: AsyncExitStack
    ) -> None:
        self.random = random.Random(seed)
        self.scheduler = scheduler
        self.store = store
        self.stack = stack
        self.calls = [Call(number) for number in range(6)]
        self.routers: list[tuple[FakeRouter, AsyncExitStack]] = []
        self.workers: list[FakeGpuWorker] = []
        self.num_routers = 0

    async def router(self) -> FakeRouter:
        """One of at most three routers."""
        if len(self.routers) < 3 and (not self.routers or self.random.random() < 0.5):
            stack = await self.stack.enter_async_context(AsyncExitStack())
            self.num_routers += 1
            name = f"r{self.num_routers}"
            router = await stack.enter_async_context(router_to(self.scheduler, name))
            self.routers.append((router, stack))
        return self.random.choice(self.routers)[0]

    async def take_up(self, call: Call) -> None:
        """Let some router have a request, which may have another router or none."""
        if call.is_cancelled or call.is_finished:
            return
        old = call.router
        call.leave()
        call.epoch += 1
        if self.random.random() < 0.5:
            self.store.epochs[call.request_id] = call.epoch
            self.store.write()
        if self.random.random() < 0.5:
            await self.advance()
        num_known = self.random.choice([0, self.random.randint(0, call.num_known), call.num_known])
        if (router := await self.router()) is old:
            # What still came for the old handle is not read any more.
            await asyncio.sleep(0)
        await call.submit(router, num_known)

    async def lose_router(self) -> None:
        if self.routers:
            router, stack = self.routers.pop(self.random.randrange(len(self.routers)))
            for call in self.calls:
                if call.router is router and not call.is_finished:
                    call.leave()
            await stack.aclose()

    async def lose_worker(self) -> None:
        worker = self.random.choice(self.workers)
        await worker.kill()
        if self.random.random() < 0.5:
            await self.advance()
        await worker.start()

    async def pause(self) -> None:
        call = self.random.choice(self.calls)
        if call.router is not None and not call.is_finished:
            await call.router.pause(call.handle, paused=self.random.random() < 0.6)

    async def write(self) -> None:
        call = self.random.choice(self.calls)
        if self.random.random() < 0.2:
            self.store.lose(call.request_id, self.random.randrange(NUM_TOKENS))
        self.store.write()

    async def cancel(self) -> None:
        call = self.random.choice(self.calls[:2])
        if call.router is not None and not call.is_finished and not call.is_cancelled:
            call.is_cancelled = True
            await call.router.cancel(call.handle)

    async def advance(self) -> None:
        """Let some more steps be done."""
        for worker in self.workers:
            await worker.release(self.random.randrange(6))
        for _ in range(self.random.randrange(20)):
            await asyncio.sleep(0)

    async def operate(self) -> None:
        operations = [
            (6, self.advance),
            (4, lambda: self.take_up(self.random.choice(self.calls))),
            (1, self.lose_router),
            (0.3, self.lose_worker),
            (2, self.pause),
            (2, self.write),
            (0.3, self.cancel),
        ]
        weights = [weight for weight, _ in operations]
        (chosen,) = self.random.choices([op for _, op in operations], weights)
        await chosen()
        for call in self.calls:
            call.read()

    async def finish(self) -> None:
        """Let everything go on undisturbed, to its end."""
        await self.scheduler.ready(2)
        for call in self.calls:
            call.read()
            if call.router is None:
                await self.take_up(call)
            elif not call.is_finished:
                await call.router.pause(call.handle, paused=False)
        for worker in self.workers:
            await worker.release()
        for call in self.calls:
            if call.is_cancelled:
                continue
            assert call.router is not None
            await call.router.finished(call.handle)
            call.read()
            assert call.num_received == NUM_TOKENS
            reason = call.router.received[call.handle].finished.reason
            assert reason == common_pb2.FINISH_REASON_LENGTH


@asynccontextmanager
async def chaos(seed: int, store: FakeStore, depth: int) -> AsyncIterator[Chaos]:
    # Too few blocks for all: requests are preempted.
    workers = [FakeGpuWorker(name, num_kv_blocks=40) for name in ("w0", "w1")]
    for worker in workers:
        worker.hold()
        await worker.start()
    settings = SchedulerSettings(pipeline_depth=depth)
    patient = PoolSettings(max_num_losses=1000, quarantine_s=0, max_orphan_tokens=20)
    async with (
        running_scheduler(workers, settings, patient, store) as scheduler,
        AsyncExitStack() as stack,
    ):
        await scheduler.ready(2)
        one = Chaos(seed, scheduler, store, stack)
        one.workers = workers
        yield one


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(12))
async def test_whatever_comes_and_goes_every_token_comes_once(seed, depth):
    store = FakeStore()
    async with chaos(seed, store, depth) as one:
        for _ in range(NUM_OPERATIONS):
            await one.operate()
        await one.finish()
        await until(lambda: store.write() == 0)
    for call in one.calls:
        if not call.is_cancelled:
            assert store.token_ids[call.request_id] == call.expected
            assert store.finals[call.request_id].state == "LENGTH_CAPPED"
