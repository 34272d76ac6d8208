"""Policies that need router and scheduler together, over a gpuworker that runs no model.

All in this process. Time is counted in steps of the worker, so a slow machine changes nothing.
"""

import asyncio
import contextlib
from dataclasses import dataclass

import grpc
import pytest

from headrace.service.columns import unpack_int32
from headrace.v1 import common_pb2, inference_pb2
from scheduler.config import SchedulerSettings
from tests.router.fake_scheduler import MODEL
from tests.router.rpc.test_overload import in_seconds, refusal_of
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

    async def steps_until(self, condition):
        began = self.worker.num_steps_begun
        await self.stack.until(condition)
        return self.worker.num_steps_begun - began

    def ids_run(self):
        """Of the requests that ever came to the worker."""
        return {r.request_id for plan in self.worker.plans for r in plan.row_requests}

    def rows_held(self):
        """Rows that the worker still keeps; who ended is freed with the next plan."""
        rows = set()
        for plan in self.worker.plans:
            rows -= set(unpack_int32(plan.freed_rows, "freed_rows").tolist())
            rows |= {request.row for request in plan.row_requests}
        return rows

    def is_free(self):
        return self.scheduler.num_free_blocks() == [self.worker.num_kv_blocks]


@contextlib.asynccontextmanager
async def both(*, scheduling=None, routing=None, pace_s=0.001, **worker):
    """At the end nothing may be left: in the router, the scheduler, or the worker's rows."""
    worker = FakeGpuWorker(model=MODEL, **worker)
    worker.pace_s = pace_s
    await worker.start()
    async with running_scheduler([worker], SchedulerSettings(**(scheduling or {}))) as scheduler:
        await scheduler.ready()
        async with running_stack(schedulers=[scheduler], **(routing or {})) as stack:
            running = Both(stack, scheduler, worker)
            yield running
            await stack.until(lambda: stack.is_empty and running.is_free())


async def test_an_urgent_request_is_served_at_once_though_others_have_all_slots():
    by_priority = {"policy": "priority"}
    async with both(
        routing=by_priority, scheduling=by_priority, max_num_seqs=4, num_kv_blocks=400
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
    async with both(routing={"policy": "priority"}, max_num_seqs=4, num_kv_blocks=400) as running:
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


async def test_short_prompts_wait_a_few_steps_beside_one_of_a_hundred_thousand_tokens():
    async with both(
        pace_s=0.01,
        max_num_seqs=64,
        max_model_len=110_000,
        block_size=64,
        num_kv_blocks=2_000,
        max_num_batched_tokens=2048,
    ) as running:
        long = asyncio.create_task(
            running.steps_to_first_token(
                token_ids={"ids": [7] * 100_000}, sampling={"max_tokens": 2}
            )
        )
        await running.worker.step_begun(2)
        # All of them come within one step, however slow this machine is.
        running.worker.hold()
        short = [
            asyncio.create_task(
                running.steps_to_first_token(
                    token_ids={"ids": [number + 1] * 64}, sampling={"max_tokens": 2}
                )
            )
            for number in range(50)
        ]
        requests = running.scheduler.switchboard.requests
        await running.stack.until(lambda: len(requests) == 51)
        await running.worker.release()
        short = await asyncio.gather(*short)
        # 3,200 tokens at the 1,024 a step that the long one leaves, and the steps in flight.
        assert max(steps for steps, _ in short) <= 8
        assert not long.done()
        steps, call = await long
        assert 90 <= steps <= 110
        for one in (call, *(call for _, call in short)):
            assert (await running.stack.rest(one))[-1].HasField("usage")


async def test_a_tenant_of_short_prompts_is_served_beside_one_of_eight_thousand_tokens():
    async with both(
        routing={"policy": "fair", "waiting_allowance": 1},
        max_num_seqs=4,
        max_model_len=9_000,
        block_size=64,
        num_kv_blocks=2_000,
        max_num_batched_tokens=1024,
    ) as running:
        stack = running.stack
        long = [
            stack.generate(
                token_ids={"ids": [number + 1] * 8_000}, tenant="long", sampling={"max_tokens": 4}
            )
            for number in range(12)
        ]
        await stack.until(lambda: stack.router.num_live == 12)
        waits = []
        for number in range(12):
            steps, call = await running.steps_to_first_token(
                token_ids={"ids": [number + 500] * 64}, tenant="short", sampling={"max_tokens": 4}
            )
            waits.append(steps)
            await stack.rest(call)
        # 94 steps are left of the long ones; a short one waits for those sent before it, 8 each,
        # and for the one turn that the others' tenant has for it.
        assert waits[0] <= 50
        assert sum(waits) <= 150
        for call in long:
            assert (await stack.rest(call))[-1].usage.prompt_tokens == 8_000


@pytest.mark.parametrize("how", ["close", "deadline", "one id", "many ids", "tenant"])
async def test_whatever_aborts_frees_everything_within_two_steps(how):
    async with both(max_num_seqs=4, num_kv_blocks=5_000, max_model_len=5_000) as running:
        stack = running.stack
        late = {"deadline": in_seconds(3.0)} if how == "deadline" else {}
        calls = [
            stack.generate(request_id=f"r-{i}", tenant="a", sampling={"max_tokens": 4_000}, **late)
            for i in range(1 if how == "one id" else 20)
        ]
        await stack.until(lambda: stack.router.num_live == len(calls))
        await stack.until(lambda: running.scheduler.num_free_blocks() != [5_000])
        match how:
            case "close":
                for call in calls:
                    call.cancel()
            case "one id" | "many ids":
                ids = [f"r-{i}" for i in range(len(calls))]
                await stack.stub.Abort(inference_pb2.AbortRequest(request_ids=ids))
            case "tenant":
                await stack.stub.Abort(inference_pb2.AbortRequest(tenant="a"))
        if how in {"close", "deadline"}:
            await stack.until(
                lambda: not stack.router.num_in_flight and not stack.router.num_queued
            )
        assert await running.steps_until(running.is_free) <= 2
        if how not in {"close", "deadline"}:
            for call in calls:
                last = (await stack.rest(call))[-1]
                assert last.outputs[0].finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_four_completions_aborted_a_thousand_times_leave_no_residue_anywhere():
    async with both(max_num_seqs=16, num_kv_blocks=200) as running:
        stack = running.stack

        async def one(number):
            call = stack.generate(
                "hello " * (number % 9 + 1),
                request_id=f"r-{number}",
                sampling={"n": 4, "max_tokens": 100},
            )
            await stack.until(lambda: f"r-{number}" in stack.router.calls._by_id)
            if number % 2:
                await call.read()
            await stack.stub.Abort(inference_pb2.AbortRequest(request_ids=[f"r-{number}"]))
            await stack.rest(call)

        for batch in range(50):
            await asyncio.gather(*(one(batch * 20 + number) for number in range(20)))
        await stack.until(lambda: stack.is_empty and running.is_free())
        assert (
            stack.router.meters.num_accepted == 1000 == sum(stack.router.meters.num_ended.values())
        )
        assert await stack.text(request_id="last", sampling={"max_tokens": 2}) is not None
        assert len(running.rows_held()) <= 1


async def test_an_abort_hits_its_own_epoch_of_an_id_that_is_used_again_at_once():
    async with both(max_num_seqs=4, num_kv_blocks=200) as running:
        stack = running.stack
        for number in range(100):
            first = stack.generate(request_id="same", sampling={"max_tokens": 100})
            if number % 2:
                await first.read()
            await stack.until(lambda: stack.router.num_live)
            await stack.stub.Abort(inference_pb2.AbortRequest(request_ids=["same"]))
            await stack.rest(first)
            await stack.until(lambda: not stack.router.num_live)
            again = [m async for m in stack.generate(request_id="same", sampling={"max_tokens": 3})]
            assert again[-1].outputs[0].finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert again[-1].usage.completion_tokens == 3


async def test_a_deadline_behind_a_longer_queue_is_dropped_before_any_prefill():
    """In the router's queue and in the scheduler's; the worker is held meanwhile."""
    async with both(routing={"waiting_allowance": 1}, max_num_seqs=1, num_kv_blocks=200) as running:
        stack = running.stack
        busy = stack.generate(sampling={"max_tokens": 200})
        await busy.read()
        running.worker.hold()
        calls = [
            stack.generate(request_id=f"late-{number}", deadline=in_seconds(1.0))
            for number in range(4)
        ]
        await stack.until(lambda: stack.router.num_live == 5)
        assert (stack.router.num_in_flight, stack.router.num_queued) == (2, 3)
        for call in calls:
            error = await refusal_of(call)
            assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await running.worker.release()
        assert (await stack.rest(busy))[-1].usage.completion_tokens == 200
        assert running.ids_run() == {running.worker.plans[0].row_requests[0].request_id}


async def test_a_prompt_bigger_than_the_pool_is_refused_and_named():
    async with both(max_num_seqs=4, num_kv_blocks=20, max_model_len=1000) as running:
        error = await refusal_of(running.stack.generate(token_ids={"ids": [5] * 81}))
        assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids")
        assert "the KV pool carries 81" in error.message
        assert await running.stack.answer(token_ids={"ids": [5] * 80}, sampling={"max_tokens": 1})
