"""Policies that need router and scheduler together, over a gpuworker that runs no model.

All in this process. Time is counted in steps of the worker, so a slow machine changes nothing.
"""

import asyncio
import contextlib
from dataclasses import dataclass

from scheduler.config import SchedulerSettings
from tests.router.fake_scheduler import MODEL
from tests.router.stack import Stack, running_stack
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import RunningScheduler, running_scheduler


@dataclass
class Both:
    """A router before a scheduler before a worker."""

    stack: Stack
    scheduler: RunningScheduler
    worker: FakeGpuWorker

    async def steps_to_first_token(self, **fields):
        began = self.worker.num_steps_begun
        call = self.stack.generate(**fields)
        await call.read()
        steps = self.worker.num_steps_begun - began
        return steps, call

    def is_free(self):
        return self.scheduler.num_free_blocks() == [self.worker.num_kv_blocks]


@contextlib.asynccontextmanager
async def both(*, scheduling=None, policy="fair", **worker):
    """At the end nothing may be left: in the router, the scheduler, or the worker's rows."""
    worker = FakeGpuWorker(model=MODEL, **worker)
    worker.pace_s = 0.001
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(**(scheduling or {}))) as scheduler:
        await scheduler.ready()
        async with running_stack(schedulers=[scheduler], policy=policy) as stack:
            running = Both(stack, scheduler, worker)
            yield running
            await stack.until(lambda: stack.is_empty and running.is_free())


async def test_an_urgent_request_is_served_at_once_though_others_have_all_slots():
    priority = {"policy": "priority"}
    async with both(
        policy="priority", scheduling=priority, max_num_seqs=4, num_kv_blocks=400
    ) as running:
        stack = running.stack
        low = [
            stack.generate(f"hello {number}", priority=9, sampling={"max_tokens": 200})
            for number in range(40)
        ]
        await stack.until(lambda: stack.router.num_queued == 40 - 12)
        for call in low[:4]:
            await call.read()
        # More than the slots and the waiting allowance together would let through.
        urgent = await asyncio.gather(
            *(
                running.steps_to_first_token(
                    text=f"now {number}", priority=0, sampling={"max_tokens": 4}
                )
                for number in range(4)
            )
        )
        assert max(steps for steps, _ in urgent) <= 12
        for _, call in urgent:
            last = (await stack.rest(call))[-1]
            assert last.usage.completion_tokens == 4
        for call in low:
            call.cancel()


async def test_without_displacing_an_urgent_request_waits_for_a_slot():
    async with both(policy="priority", max_num_seqs=4, num_kv_blocks=400) as running:
        stack = running.stack
        low = [
            stack.generate(f"hello {number}", priority=9, sampling={"max_tokens": 200})
            for number in range(40)
        ]
        await stack.until(lambda: stack.router.num_queued == 40 - 12)
        urgent = stack.generate("now", priority=0, sampling={"max_tokens": 4})
        await stack.until(lambda: stack.router.num_queued == 40 - 12 + 1)
        assert stack.router.num_in_flight == 12
        for call in low:
            call.cancel()
        assert (await stack.rest(urgent))[-1].usage.completion_tokens == 4
