"""The Scheduler service over real gRPC: streams that end, refuse, are slow or watch."""

import asyncio
import math

import grpc
import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from headrace.service.protocol import REFUSAL_REASON
from headrace.v1 import common_pb2, inference_pb2, scheduler_pb2
from scheduler.config import PoolSettings
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import PATIENCE_S, FakeRouter, router_to, running_scheduler, until

PROMPT = [11, 12, 13, 14, 15]


@pytest.fixture
async def worker():
    worker = FakeGpuWorker(max_num_batched_tokens=16)
    await worker.start()
    yield worker
    await worker.kill()


async def test_as_many_tokens_as_the_field_can_ask_for_are_as_many_as_fit(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 2**32 - 1)
            (tokens,) = await router.finished(handle)
            assert len(PROMPT) + len(tokens) == worker.max_model_len


async def test_what_a_gone_router_leaves_ends_before_the_next_step_when_its_time_is_over(worker):
    settings = PoolSettings(orphan_ttl_s=0)
    async with running_scheduler([worker], None, settings) as scheduler:
        await scheduler.ready()
        requests = scheduler.switchboard.requests
        async with router_to(scheduler, "stays") as stays:
            kept = await stays.submit(PROMPT, 60)
            async with router_to(scheduler, "leaves") as leaves:
                # Decoding, in the middle of its prompt, and not admitted yet.
                await leaves.submit([30, 31], 200)
                await leaves.has_tokens(0, 2)
                worker.hold()
                await leaves.submit_all([([40 + i] * 60, 20) for i in range(30)])
                await worker.release(3)
                await until(lambda: len(requests) == 32)
                await worker.held()
                num_plans = len(worker.plans)
            await until(lambda: len(requests) == 1)
            assert len(worker.plans) == num_plans
            assert scheduler.num_free_blocks()[0] >= worker.num_kv_blocks - 4
            await worker.release()
            assert await stays.finished(kept) == [expected_tokens(PROMPT, 60)]


async def test_half_closing_ends_the_stream(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            await router.submit(PROMPT, 200)
            await router.has_tokens(0, 1)
            await router.call.done_writing()
            assert await router.ended() is None
            assert await router.call.code() == grpc.StatusCode.OK
        assert not scheduler.switchboard._outboxes


async def test_a_stream_must_begin_with_hello(worker):
    async with running_scheduler([worker]) as scheduler:
        router = FakeRouter(scheduler.address, "rude")
        await router.submit(PROMPT, 3)
        await router.read()
        await router.close()
    error = from_rpc_error(router.error)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "hello")


def reason_of(refusal):
    return REFUSAL_REASON.word(refusal.reason, None)


@pytest.mark.parametrize("router_id", ["two\nlines", "nul\0", "x" * 257])
async def test_a_router_whose_name_could_not_be_read_in_a_log_is_refused(worker, router_id):
    async with running_scheduler([worker]) as scheduler:
        router = FakeRouter(scheduler.address, "rude")
        await router.send(hello=scheduler_pb2.Hello(router_id=router_id))
        await router.read()
        await router.close()
    error = from_rpc_error(router.error)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "hello.router_id")


async def test_a_stream_may_end_while_its_first_message_is_sent(worker, caplog):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        for number in range(100):
            router = FakeRouter(scheduler.address, "hasty")
            await router.send(hello=scheduler_pb2.Hello(router_id="hasty"))
            # It is refused at once, just when the stream ends.
            await router.submit_all([([1], 1)] * 3, model="other", request_id=f"r{number}")
            await router.call.done_writing()
            async with asyncio.timeout(PATIENCE_S):
                await router.read()
            await router.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"model": "other"}, "NO_WORKER", "other"),
        ({"worker_id": "w9"}, "NO_WORKER", "w9"),
        ({"worker_id": "w0", "model": "other"}, "NO_WORKER", "serves 'fake'"),
        ({"request_id": ""}, "INVALID", "request_id"),
        ({"request_id": "a b"}, "INVALID", "request_id"),
        ({"prompt_token_ids": b""}, "INVALID", "prompt_token_ids"),
        ({"prompt_token_ids": b"12345"}, "INVALID", "prompt_token_ids"),
        ({"prompt_token_ids": b"\xff\xff\xff\xff"}, "INVALID", "prompt_token_ids"),
        ({"prompt_token_ids": b"\xe8\x03\x00\x00"}, "INVALID", "below 1000"),
        ({"generated_token_ids": b"\xff\xff\xff\xff"}, "INVALID", "generated_token_ids"),
        ({"generated_token_ids": b"\xe8\x03\x00\x00"}, "INVALID", "below 1000"),
        ({"prompt_token_ids": b"\x0b\x00\x00\x00" * 256}, "TOO_LONG", "max_model_len"),
        ({"sampling": common_pb2.SamplingParams(max_tokens=1)}, "INVALID", "seed"),
        ({"sampling": common_pb2.SamplingParams(seed=1)}, "INVALID", "max_tokens"),
        ({"arrival_time_unix_s": math.nan}, "INVALID", "arrival_time_unix_s"),
        ({"deadline_unix_s": math.inf}, "INVALID", "deadline_unix_s"),
    ],
)
async def test_a_submission_that_cannot_be_served_is_refused_and_leaves_nothing(
    worker, fields, reason, text
):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            submission = router.submission(PROMPT, 3)
            for name, value in fields.items():
                if name == "sampling":
                    submission.sampling.CopyFrom(value)
                else:
                    setattr(submission, name, value)
            await router.send(submissions=[submission])
            refusal = await router.refused(submission.handle)
            assert (reason_of(refusal), text in refusal.message) == (reason, True), refusal
            good = await router.submit(PROMPT, 3)
            assert await router.finished(good) == [expected_tokens(PROMPT, 3)]


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"top_p": 2.0}, "sampling.top_p"),
        ({"min_p": -0.5}, "sampling.min_p"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"presence_penalty": math.inf}, "sampling.presence_penalty"),
        ({"logprobs": 3_000_000_000}, "sampling.logprobs"),
        ({"prompt_logprobs": 21}, "sampling.prompt_logprobs"),
        ({"logit_bias": {7: math.nan}}, "sampling.logit_bias"),
        ({"logit_bias": {1000: 1.0}}, "sampling.logit_bias: must be below 1000"),
        ({"stop_token_ids": [4_000_000_000]}, "sampling.stop_token_ids: must be below 1000"),
        ({"bad_token_ids": [{"ids": [1, 1000]}]}, "sampling.bad_token_ids: must be below 1000"),
    ],
)
async def test_settings_that_no_worker_could_use_never_come_to_one(worker, sampling, text):
    """A worker would refuse the whole step, and with it everybody else's."""
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            good = await router.submit(PROMPT, 40)
            bad = await router.submit(
                [21, 22], 5, sampling=common_pb2.SamplingParams(**sampling), request_id="bad"
            )
            refusal = await router.refused(bad)
            assert (reason_of(refusal), text in refusal.message) == ("INVALID", True), refusal
            assert text.partition(":")[0] in refusal.field
            assert await router.finished(good) == [expected_tokens(PROMPT, 40)]
    assert "bad" not in {r.request_id for plan in worker.plans for r in plan.row_requests}


async def test_a_prompt_that_the_pool_can_never_hold_is_refused():
    worker = FakeGpuWorker(num_kv_blocks=4)
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            taken = await router.submit([11] * 16, 1)
            assert await router.finished(taken) == [expected_tokens([11] * 16, 1)]
            refusal = await router.refused(await router.submit([11] * 17, 1))
            assert refusal.reason == scheduler_pb2.REFUSAL_REASON_TOO_LONG
            assert "KV blocks" in refusal.message


async def test_a_live_id_is_a_duplicate_unless_its_epoch_is_greater(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler, "a") as one, router_to(scheduler, "b") as other:
            first = await one.submit(PROMPT, 200, request_id="same", epoch=3)
            await one.has_tokens(first, 1)
            again = await one.submit(PROMPT, 5, request_id="same", epoch=3)
            assert (await one.refused(again)).reason == scheduler_pb2.REFUSAL_REASON_DUPLICATE
            late = await other.submit(PROMPT, 5, request_id="same", epoch=2)
            assert (await other.refused(late)).reason == scheduler_pb2.REFUSAL_REASON_DUPLICATE
            newer = await other.submit(PROMPT, 5, request_id="same", epoch=4)
            assert await other.finished(newer) == [expected_tokens(PROMPT, 5)]
            await one.wait_for(lambda: one.received[first].has_moved)


async def test_an_id_can_be_reused_right_after_its_abort(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            for _ in range(50):
                aborted = await router.submit(PROMPT, 50, request_id="same")
                cancellation = scheduler_pb2.Cancellation(handle=aborted)
                submission = router.submission(PROMPT, 3, request_id="same")
                await router.send(cancellations=[cancellation])
                await router.send(submissions=[submission])
                assert (await router.finished(aborted, submission.handle))[1] == expected_tokens(
                    PROMPT, 3
                )


async def test_a_live_handle_cannot_be_given_again(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 100)
            again = router.submission(PROMPT, 3)
            again.handle = handle
            await router.send(submissions=[again])
            assert "in use" in (await router.refused(handle)).message
            await router.finished(handle)


async def test_tokens_of_an_earlier_epoch_are_built_upon_and_not_sent_again(worker):
    tokens = expected_tokens(PROMPT, 12)
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            submission = router.submission(PROMPT, 12, epoch=2)
            submission.generated_token_ids = b"".join(
                token.to_bytes(4, "little") for token in tokens[:7]
            )
            await router.send(submissions=[submission])
            assert await router.finished(submission.handle) == [tokens[7:]]


@pytest.mark.parametrize(
    ("sampling", "num_generated", "reason"),
    [
        (common_pb2.SamplingParams(max_tokens=7), 7, common_pb2.FINISH_REASON_LENGTH),
        (
            common_pb2.SamplingParams(max_tokens=9, stop_token_ids=expected_tokens(PROMPT, 5)[4:]),
            5,
            common_pb2.FINISH_REASON_STOP,
        ),
    ],
)
async def test_a_request_that_had_its_last_token_only_ends(worker, sampling, num_generated, reason):
    tokens = expected_tokens(PROMPT, num_generated)
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            submission = router.submission(PROMPT, 1, epoch=2, sampling=sampling)
            submission.generated_token_ids = b"".join(t.to_bytes(4, "little") for t in tokens)
            await router.send(submissions=[submission])
            assert await router.finished(submission.handle) == [[]]
            assert router.received[submission.handle].finished.reason == reason
    assert not worker.plans


async def test_a_slow_router_gets_larger_messages_and_holds_up_nobody(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        slow = FakeRouter(scheduler.address, "slow")
        await slow.send(hello=scheduler_pb2.Hello(router_id="slow"))
        handles = await slow.submit_all([([30 + i], 150) for i in range(8)])
        async with router_to(scheduler, "quick") as quick:
            quickly = await quick.submit(PROMPT, 50)
            assert await quick.finished(quickly) == [expected_tokens(PROMPT, 50)]
            await until(lambda: len(scheduler.switchboard.requests) == 0)
        reading = asyncio.create_task(slow.read())
        assert await slow.finished(*handles) == [expected_tokens([30 + i], 150) for i in range(8)]
        await slow.close()
        await reading


async def test_the_stream_of_a_router_that_never_reads_is_ended():
    worker = FakeGpuWorker(max_model_len=100_000, num_kv_blocks=40_000)
    await worker.start()
    pool_settings = PoolSettings(max_waiting_tokens=500)
    async with running_scheduler([worker], None, pool_settings) as scheduler:
        await scheduler.ready()
        # What gRPC itself buffers is small and soon full: its window does not grow.
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
        channel = grpc.aio.insecure_channel(scheduler.address, options=options)
        stuck = FakeRouter(scheduler.address, "stuck", channel)
        await stuck.send(hello=scheduler_pb2.Hello(router_id="stuck"))
        sampling = common_pb2.SamplingParams(logprobs=20)
        await stuck.submit_all([(PROMPT, 90_000)] * 12, sampling=sampling)
        await until(lambda: len(scheduler.switchboard.requests) > 0)
        await until(lambda: not scheduler.switchboard._outboxes)
        await stuck.read()
        await stuck.close()
    error = from_rpc_error(stuck.error)
    assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "ROUTER_TOO_SLOW")


async def test_watching_shows_the_pool_now_and_when_it_changes(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            watch = router.stub.WatchPool(scheduler_pb2.WatchPoolRequest())
            first = await watch.read()
            assert first.scheduler_id == "s0"
            (shown,) = first.workers
            assert shown.state == common_pb2.WORKER_STATE_READY
            assert (shown.num_free_kv_blocks, shown.num_kv_blocks) == (64, 64)
            assert (shown.vocab_size, shown.max_num_seqs) == (1000, 16)
            worker.hold()
            handle = await router.submit(PROMPT, 10)
            busy = await _first(watch, lambda w: w.num_running == 1)
            assert busy.num_free_kv_blocks < 64
            await router.cancel(handle)
            idle = await _first(watch, lambda w: w.num_running == 0)
            assert idle.num_free_kv_blocks == 64
            await worker.release()
            await worker.kill()
            await _first(watch, lambda w: w.state == common_pb2.WORKER_STATE_LOST)
            watch.cancel()


async def _first(watch, condition) -> common_pb2.Worker:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            snapshot = await watch.read()
            if condition(snapshot.workers[0]):
                return snapshot.workers[0]


async def test_draining_refuses_new_requests_and_finishes_live_ones(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            live = await router.submit(PROMPT, 60)
            await router.has_tokens(live, 1)
            draining = asyncio.create_task(scheduler.pool.drain(10))
            await until(lambda: scheduler.pool.is_draining)
            refused = await router.submit(PROMPT, 3)
            assert (await router.refused(refused)).reason == scheduler_pb2.REFUSAL_REASON_DRAINING
            watch = router.stub.WatchPool(scheduler_pb2.WatchPoolRequest())
            snapshot = await watch.read()
            watch.cancel()
            assert snapshot.draining
            assert snapshot.workers[0].state == common_pb2.WORKER_STATE_DRAINING
            assert await draining
            scheduler.service.close_streams()
            error = from_rpc_error(await router.ended())
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINED")
            # What waited was sent first.
            assert router.received[live].token_ids == expected_tokens(PROMPT, 60)
            assert router.received[live].finished is not None


async def test_draining_waits_neither_for_paused_requests_nor_for_orphans(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            async with router_to(scheduler, "gone") as gone:
                await gone.has_tokens(await gone.submit([31, 32], 200), 1)
                worker.hold()
            paused = await router.submit(PROMPT, 200)
            live = await router.submit(PROMPT, 5)
            await router.pause(paused)
            await until(lambda: [r.is_paused for r in scheduler.switchboard.requests].count(True))
            await until(lambda: len(scheduler.switchboard._outboxes) == 1)
            draining = asyncio.create_task(scheduler.pool.drain(PATIENCE_S))
            await worker.release(8)
            await router.finished(live)
            assert await draining
            assert len(scheduler.switchboard.requests) == 2
        await worker.release()


async def test_a_request_is_explained_while_it_runs_and_after_it_ended(worker):
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with router_to(scheduler) as router:
            handle = await router.submit(PROMPT, 100)
            await router.has_tokens(handle, 2)
            ask = inference_pb2.ExplainRequest(request_id="r0-0")
            running = await router.stub.Explain(ask)
            assert [event.kind for event in running.events][:2] == ["ADDED", "ADMITTED"]
            await router.cancel(handle)
            await router.finished(handle)
            ended = await router.stub.Explain(ask)
            assert ended.events[-1].kind == "FINISHED"
            with pytest.raises(grpc.aio.AioRpcError) as unknown:
                await router.stub.Explain(inference_pb2.ExplainRequest(request_id="nobody"))
            assert unknown.value.code() == grpc.StatusCode.NOT_FOUND
