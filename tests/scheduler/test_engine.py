"""The engine loop between a router and a gpuworker, over real gRPC; aborts in every state."""

import random
import time

import pytest

from headrace.v1 import common_pb2, scheduler_pb2
from scheduler.config import SchedulerSettings
from tests.scheduler.fake_gpuworker import (
    EOS_TOKEN_ID,
    FakeGpuWorker,
    expected_tokens,
)
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]
DEPTHS = pytest.mark.parametrize("depth", [1, 2])


def settings(**fields) -> SchedulerSettings:
    return SchedulerSettings(**fields)


@DEPTHS
async def test_tokens_come_back_in_order_and_the_request_ends_at_max_tokens(depth):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 20)
            assert await router.finished(handle) == [expected_tokens(PROMPT, 20)]
            received = router.received[handle]
    assert received.finished.reason == common_pb2.FINISH_REASON_LENGTH
    assert received.admitted.worker_id == "w0"
    assert abs(received.admitted.time_unix_s - time.time()) < 60


async def test_a_worker_learns_that_a_row_is_free_though_nothing_follows():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            await router.finished(await router.submit(PROMPT, 3))
            await until(lambda: bool(worker.plans[-1].freed_rows))
            assert not worker.plans[-1].rows


@DEPTHS
async def test_eos_ends_a_request_unless_it_is_ignored(depth):
    worker = FakeGpuWorker()
    worker.eos_after = {"r0-0": 4, "r0-1": 4}
    await worker.start()
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            stopped = await router.submit(PROMPT, 10)
            ignoring = await router.submit(
                PROMPT, 10, sampling=common_pb2.SamplingParams(ignore_eos=True)
            )
            tokens, more = await router.finished(stopped, ignoring)
    assert tokens == [*expected_tokens(PROMPT, 4), EOS_TOKEN_ID]
    assert len(more) == 10
    assert router.received[stopped].finished.reason == common_pb2.FINISH_REASON_STOP
    assert not router.received[stopped].finished.HasField("stop_token_id")


async def test_a_stop_token_is_named():
    worker = FakeGpuWorker()
    await worker.start()
    stop = expected_tokens(PROMPT, 3)[2]
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(
                PROMPT, 10, sampling=common_pb2.SamplingParams(stop_token_ids=[stop])
            )
            (tokens,) = await router.finished(handle)
    assert tokens[-1] == stop
    assert router.received[handle].finished.stop_token_id == stop


@DEPTHS
async def test_five_hundred_requests_on_a_tiny_pool_are_preempted_and_all_finish(depth):
    worker = FakeGpuWorker(num_kv_blocks=24, max_num_seqs=12, max_num_batched_tokens=48)
    await worker.start()
    rng = random.Random(5)
    shared = [rng.randrange(10, 900) for _ in range(12)]
    prompts = [
        shared[: rng.randrange(13)] + [rng.randrange(10, 900) for _ in range(rng.randrange(1, 20))]
        for _ in range(500)
    ]
    lengths = [rng.randrange(1, 24) for _ in prompts]
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handles = await router.submit_all(list(zip(prompts, lengths, strict=True)))
            tokens = await router.finished(*handles)
            received = [router.received[handle] for handle in handles]
    assert tokens == [expected_tokens(p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert sum(r.finished.num_preemptions for r in received) > 10
    assert any(r.admitted.num_cached_tokens for r in received)


@DEPTHS
async def test_urgent_requests_displace_others_in_mid_step_and_no_request_reads_wrong_kv(depth):
    worker = FakeGpuWorker(num_kv_blocks=120, max_num_seqs=2, max_num_batched_tokens=48)
    await worker.start()
    rng = random.Random(6)
    shared = [rng.randrange(10, 900) for _ in range(60)]
    fields = settings(pipeline_depth=depth, policy="priority", long_prefill_token_threshold=24)
    async with running_scheduler([worker], fields) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            expected = {}
            worker.hold()
            for _ in range(40):
                for _ in range(3):
                    own = [rng.randrange(10, 900) for _ in range(rng.randrange(1, 80))]
                    prompt = shared[: rng.randrange(60)] + own
                    handle = await router.submit(prompt, 6, priority=rng.randrange(10))
                    expected[handle] = expected_tokens(prompt, 6)
                await worker.release(rng.randrange(1, 4))
                await worker.held()
            await worker.release()
            assert await router.finished(*expected) == list(expected.values())
            displaced = [r for r in router.received.values() if r.finished.num_preemptions]
    assert displaced


@DEPTHS
async def test_two_routers_get_their_own_tokens_only(depth):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            ones = await one.submit_all([([20 + i], 9) for i in range(5)])
            others = await other.submit_all([([40 + i], 7) for i in range(5)])
            assert await one.finished(*ones) == [expected_tokens([20 + i], 9) for i in range(5)]
            assert await other.finished(*others) == [expected_tokens([40 + i], 7) for i in range(5)]


@DEPTHS
async def test_aborting_a_queued_request_never_runs_it(depth):
    worker = FakeGpuWorker(max_num_seqs=1)
    await worker.start()
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            running = await router.submit(PROMPT, 30)
            queued = await router.submit([77], 30)
            await router.has_tokens(running, 2)
            await router.cancel(queued)
            await router.finished(queued, running)
    received = router.received[queued]
    assert received.finished.reason == common_pb2.FINISH_REASON_ABORTED
    assert received.admitted is None
    assert received.token_ids == []
    placed = [r.request_id for plan in worker.plans for r in plan.row_requests]
    assert placed == ["r0-0"]


@DEPTHS
async def test_aborting_a_prefill_between_its_chunks_frees_it_at_once(depth):
    worker = FakeGpuWorker(max_num_batched_tokens=8)
    chunked = settings(pipeline_depth=depth, long_prefill_token_threshold=8)
    worker.hold()
    await worker.start()
    async with running_scheduler([worker], chunked) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(list(range(20, 80)), 5)
            await worker.release(2)
            await worker.step_begun(3)
            await router.cancel(handle)
            await router.finished(handle)
            assert scheduler.num_free_blocks() == [worker.num_kv_blocks]
            num_plans = len(worker.plans)
            await worker.release()
            other = await router.submit(PROMPT, 3)
            assert await router.finished(other) == [expected_tokens(PROMPT, 3)]
    assert router.received[handle].token_ids == []
    # What was planned ahead still runs; nothing more of it is planned.
    scheduled = [plan for plan in worker.plans[num_plans:] if plan.rows]
    assert len(scheduled) <= 3 + depth - 1


@DEPTHS
async def test_aborting_while_the_worker_runs_drops_the_step_s_token(depth):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 50)
            await router.has_tokens(handle, 3)
            worker.hold()
            begun = worker.num_steps_begun
            await worker.step_begun(begun + 1)
            await router.cancel(handle)
            (tokens,) = await router.finished(handle)
            assert scheduler.num_free_blocks() == [worker.num_kv_blocks]
            await worker.release()
            other = await router.submit([99], 3)
            assert await router.finished(other) == [expected_tokens([99], 3)]
    assert tokens == expected_tokens(PROMPT, len(tokens))
    assert router.received[handle].token_ids == tokens


@DEPTHS
async def test_a_preempted_request_can_be_aborted_while_it_waits(depth):
    worker = FakeGpuWorker(num_kv_blocks=8, max_num_seqs=4)
    await worker.start()
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            worker.hold()
            elder = await router.submit(list(range(20, 28)), 20)
            younger = await router.submit(list(range(30, 38)), 20)
            # 8 blocks of 4 tokens hold 32 of the 56 tokens they need: the younger gives way.
            engine = scheduler.pool._workers[0].engine
            while not _num_preemptions(engine, "r0-1"):
                await worker.held()
                await worker.release(1)
            await worker.held()
            assert (engine.num_running, engine._core.num_waiting) == (1, 1)
            await router.cancel(younger)
            await router.finished(younger)
            await worker.release()
            assert await router.finished(elder) == [expected_tokens(list(range(20, 28)), 20)]
    assert router.received[younger].finished.num_preemptions == 1


def _num_preemptions(engine, request_id: str) -> int:
    explanation = engine._core.explain(request_id)
    return explanation.num_preemptions if explanation is not None else 0


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (scheduler_pb2.CANCEL_REASON_UNSPECIFIED, common_pb2.FINISH_REASON_ABORTED),
        (scheduler_pb2.CANCEL_REASON_STOP_STRING, common_pb2.FINISH_REASON_STOP),
        (scheduler_pb2.CANCEL_REASON_DEADLINE, common_pb2.FINISH_REASON_DEADLINE),
    ],
)
async def test_a_cancelled_request_ends_for_the_reason_given(reason, expected):
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 200)
            await router.has_tokens(handle, 1)
            await router.cancel(handle, reason=reason)
            await router.finished(handle)
            await router.cancel(handle, reason=reason)  # it has ended: nothing happens
            again = await router.submit(PROMPT, 2)
            await router.finished(again)
    assert router.received[handle].finished.reason == expected


@DEPTHS
async def test_a_deadline_ends_running_and_waiting_requests(depth):
    worker = FakeGpuWorker(max_num_seqs=1)
    worker.hold()
    await worker.start()
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            deadline = time.time() + 3600
            running = await router.submit(PROMPT, 200, deadline_unix_s=deadline)
            waiting = await router.submit([50], 200, deadline_unix_s=deadline)
            await worker.release(5)
            await router.has_tokens(running, 5)
            scheduler.skipped_s = 7200
            await worker.release()
            await router.finished(running, waiting)
    assert router.received[running].finished.reason == common_pb2.FINISH_REASON_DEADLINE
    assert router.received[running].token_ids
    assert router.received[waiting].finished.reason == common_pb2.FINISH_REASON_DEADLINE
    assert router.received[waiting].admitted is None


async def test_a_failed_row_ends_its_request_alone():
    worker = FakeGpuWorker()
    worker.failing_ids.add("r0-0")
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handles = await router.submit_all([(PROMPT, 8), ([9, 8, 7], 8)])
            _, good = await router.finished(*handles)
    failed = router.received[handles[0]].finished
    assert failed.reason == common_pb2.FINISH_REASON_ERROR
    assert failed.message == "logits are not finite"
    assert good == expected_tokens([9, 8, 7], 8)


@DEPTHS
async def test_log_probabilities_come_one_per_token_and_the_prompt_s_in_one_piece(depth):
    worker = FakeGpuWorker(max_num_batched_tokens=6)
    await worker.start()
    prompt = list(range(20, 40))
    sampling = common_pb2.SamplingParams(logprobs=0, prompt_logprobs=0)
    async with running_scheduler([worker], settings(pipeline_depth=depth)) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            await router.finished(await router.submit(prompt, 2))
            handle = await router.submit(prompt, 5, sampling=sampling)
            (tokens,) = await router.finished(handle)
            received = router.received[handle]
    assert [entry.token_id for entry in received.logprobs] == tokens
    # Though the prompt is in the prefix cache by now.
    assert [entry.token_id for entry in received.prompt_logprobs] == prompt[1:]


async def test_long_prompts_are_hashed_between_steps_and_can_be_aborted_meanwhile():
    worker = FakeGpuWorker(num_kv_blocks=8192, max_model_len=20_000, max_num_batched_tokens=16_384)
    worker.hold()
    await worker.start()
    rng = random.Random(1)
    long = [rng.randrange(10, 900) for _ in range(12_000)]
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            short = await router.submit(PROMPT, 4)
            await worker.step_begun(1)
            given_up, kept = await router.submit_all([(long, 4), (long[1:], 4)])
            await router.cancel(given_up)
            await router.finished(given_up)
            await worker.release()
            assert await router.finished(short, kept) == [
                expected_tokens(PROMPT, 4),
                expected_tokens(long[1:], 4),
            ]


async def test_an_idle_engine_plans_nothing():
    worker = FakeGpuWorker()
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            await router.finished(await router.submit(PROMPT, 3))
            engine = scheduler.pool._workers[0].engine
            await until(lambda: not engine._in_flight)
            last, num_plans = worker.plans[-1].step_id, len(worker.plans)
            await router.finished(await router.submit(PROMPT, 1))
    # One empty plan showed that there was nothing more; it was not sent.
    assert worker.plans[num_plans].step_id <= last + 2
