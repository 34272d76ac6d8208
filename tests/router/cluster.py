"""Two routers and two schedulers around one real store."""

import asyncio
import contextlib
from dataclasses import dataclass

from headrace.status.embedded import EmbeddedStore
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from tests.router.fake_journal import FakeJournal
from tests.router.fake_scheduler import FakeScheduler, worker
from tests.router.stack import Stack, running_stack


@dataclass
class Cluster:
    """a and b are routers; schedulers have one worker each."""

    a: Stack
    b: Stack
    schedulers: list[FakeScheduler]
    stores: list[StatusStore]
    url: str

    async def flush(self):
        """All that routers and schedulers have recorded is in the store."""
        for store in (self.a.store, self.b.store, *self.stores):
            assert await store.flush(20)


@contextlib.asynccontextmanager
async def running_scheduler(name, url, script, incarnation="one", **fields):
    """A fake scheduler that writes into the store."""
    scheduler = FakeScheduler(script=script, **fields)
    scheduler.name = name
    scheduler.workers = [worker(worker_id=f"worker-{name}")]
    scheduler.journal = FakeJournal(name, incarnation)
    async with StatusStore(url, Writer.SCHEDULER) as store, scheduler:
        store.source = scheduler.journal
        tasks = [
            asyncio.create_task(store.run()),
            asyncio.create_task(store.hold_lease("scheduler", name, incarnation)),
        ]
        try:
            yield scheduler, store
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@contextlib.asynccontextmanager
async def running_cluster(*, script=None, url=None, **settings):
    async with contextlib.AsyncExitStack() as stack:
        if url is None:
            url = (await stack.enter_async_context(EmbeddedStore())).url
        pairs = [
            await stack.enter_async_context(running_scheduler(name, url, script, interval_s=0.0005))
            for name in ("one", "two")
        ]
        schedulers = [scheduler for scheduler, _ in pairs]
        stacks = [
            await stack.enter_async_context(
                running_stack(schedulers=schedulers, store_url=url, router_id=name, **settings)
            )
            for name in ("router-a", "router-b")
        ]
        cluster = Cluster(*stacks, schedulers, [store for _, store in pairs], url)
        for one in stacks:
            await one.until(lambda one=one: one.store.is_durable)
            await one.until(lambda one=one: len(one.router.pool.reports()) == 2)
        yield cluster
