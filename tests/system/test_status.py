"""What a request's status says, written by router and scheduler into a real store."""

import asyncio

from headrace.status.embedded import EmbeddedStore
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from tests.headrace.waiting import eventually
from tests.router.fake_scheduler import MODEL
from tests.router.stack import running_stack
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import running_scheduler, until


async def test_an_id_that_is_used_again_shows_the_request_that_uses_it():
    worker = FakeGpuWorker(model=MODEL)
    await worker.start()
    async with (
        EmbeddedStore() as embedded,
        StatusStore(embedded.url, Writer.SCHEDULER) as store,
        running_scheduler([worker], store=store) as scheduler,
        running_stack(schedulers=[scheduler], store_url=embedded.url) as stack,
    ):
        writing = asyncio.create_task(store.run())

        async def shows(state: State) -> None:
            async def is_shown() -> bool:
                record = await store.get("r")
                return record is not None and record.state is state

            await eventually(is_shown)

        await scheduler.ready()
        engine = scheduler.pool._workers[0].engine
        for token_id in range(3):
            worker.hold()
            call = stack.generate(token_ids={"ids": [11, token_id]}, request_id="r")
            await shows(State.RUNNING)
            await worker.release()
            await stack.rest(call)
            await shows(State.LENGTH_CAPPED)
            # A step that only frees the row must not be the one that is held up.
            await until(lambda: bool(worker.plans[-1].freed_rows) and not engine._in_flight)
        writing.cancel()
        await asyncio.wait([writing])


async def test_the_record_of_a_request_that_nobody_resumed_says_so():
    worker = FakeGpuWorker(model=MODEL)
    await worker.start()
    async with (
        EmbeddedStore() as embedded,
        StatusStore(embedded.url, Writer.SCHEDULER) as store,
        running_scheduler([worker], store=store) as scheduler,
        running_stack(
            schedulers=[scheduler], store_url=embedded.url, recovery={"orphan_ttl_s": 0.2}
        ) as stack,
    ):
        writing = asyncio.create_task(store.run())
        await scheduler.ready()
        worker.hold()
        call = stack.generate(token_ids={"ids": [11]}, request_id="r", keep_on_disconnect=True)
        await until(lambda: bool(worker.plans))
        call.cancel()

        async def is_told() -> bool:
            record = await store.get("r")
            return record is not None and record.detail == "nobody resumed the request for 0.2 s"

        await eventually(is_told)
        await worker.release()
        writing.cancel()
        await asyncio.wait([writing])
