"""Many callers at once, slow ones among them."""

import asyncio
import random

import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2_grpc
from tests.router.fake_scheduler import FakeScheduler, Script, worker
from tests.router.stack import running_stack
from tests.router.tiny_models import byte_level_model

TOKENIZER = byte_level_model().tokenizer


def counts_up(submission):
    """Every request has a text of its own."""
    text = f"{submission.request_id} " * (submission.sampling.seed % 5 + 1)
    return Script(TOKENIZER.encode(text, add_special_tokens=False).tolist())


async def test_two_hundred_callers_each_get_their_own_whole_text(stack):
    stack.scheduler.script = counts_up
    stack.scheduler.set_workers(worker(max_num_seqs=32))
    await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 32)

    async def one(number):
        text = await stack.text(request_id=f"r-{number}", sampling={"seed": number})
        assert text == f"r-{number} " * (number % 5 + 1)

    await asyncio.gather(*(one(number) for number in range(200)))
    assert len(stack.scheduler.submissions) == 200


async def test_no_more_are_sent_than_a_worker_has_credit_for(stack):
    stack.scheduler.is_paced = False
    stack.scheduler.set_workers(worker(max_num_seqs=16))
    await stack.until(lambda: stack.router.pool.reports()[0].max_num_seqs == 16)
    calls = [stack.generate(sampling={"max_tokens": 2}) for _ in range(60)]
    await stack.until(lambda: stack.router.num_queued == 60 - 24)
    assert len(stack.scheduler.live) == stack.router.num_in_flight == 24
    while stack.router.num_live:
        assert len(stack.scheduler.live) <= 24
        stack.scheduler.step()
        await asyncio.sleep(0.001)
    for call in calls:
        assert [m async for m in call][-1].usage.completion_tokens == 2


async def test_a_caller_that_does_not_read_holds_up_nobody():
    num_tokens = 4_000_000  # more than gRPC itself buffers for a stream
    async with running_stack(streams={"max_unread_tokens": num_tokens}) as stack:
        stack.scheduler.script = lambda s: Script([65] * s.sampling.max_tokens)
        stack.scheduler.tokens_per_step = num_tokens // 400
        stack.scheduler.set_workers(worker(max_model_len=2 * num_tokens, num_kv_blocks=num_tokens))
        await stack.until(lambda: stack.router.pool.reports()[0].num_kv_blocks == num_tokens)
        slow = stack.generate(sampling={"max_tokens": num_tokens})
        first = await slow.read()
        for _ in range(20):
            assert await stack.text(sampling={"max_tokens": 20}) == TOKENIZER.decode([65] * 20)
        await stack.until(lambda: not stack.scheduler.live)
        messages = [first, *await stack.rest(slow)]
        assert sum(len(m.outputs[0].token_ids) for m in messages) == num_tokens
        # What came while nothing could be written is in one large message.
        assert len(messages) < 400
        assert max(len(m.outputs[0].token_ids) for m in messages) > num_tokens // 400


async def test_a_caller_that_leaves_too_much_unread_is_cut_off_in_words():
    streams = {"max_unread_tokens": 50_000, "slow_client": "cut"}
    async with running_stack(streams=streams) as stack:
        stack.scheduler.script = lambda s: Script([65] * s.sampling.max_tokens)
        stack.scheduler.tokens_per_step = 10_000
        stack.scheduler.set_workers(worker(max_model_len=50_000_000, num_kv_blocks=10_000_000))
        await stack.until(lambda: stack.router.pool.reports()[0].num_kv_blocks == 10_000_000)
        slow = stack.generate(sampling={"max_tokens": 30_000_000})
        await slow.read()
        await stack.until(lambda: stack.scheduler.cancellations)
        assert not stack.scheduler.live
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.rest(slow)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SLOW_CLIENT",
        )


async def test_a_scheduler_that_knows_no_pauses_does_not_fill_the_router():
    async with running_stack(streams={"max_unread_tokens": 50_000}) as stack:
        stack.scheduler.heeds_pauses = False
        stack.scheduler.script = lambda s: Script([65] * s.sampling.max_tokens)
        stack.scheduler.tokens_per_step = 10_000
        stack.scheduler.set_workers(worker(max_model_len=50_000_000, num_kv_blocks=10_000_000))
        await stack.until(lambda: stack.router.pool.reports()[0].num_kv_blocks == 10_000_000)
        slow = stack.generate(request_id="slow", sampling={"max_tokens": 30_000_000})
        await slow.read()
        await stack.until(lambda: stack.scheduler.cancellations)
        assert stack.scheduler.pauses[-1] == ("slow", True)
        with pytest.raises(grpc.aio.AioRpcError, match="more than 50000 of its tokens are unread"):
            await stack.rest(slow)


async def test_a_paused_request_of_a_lost_scheduler_is_sent_on_when_its_client_reads():
    num_tokens = 100_000

    def script(submission):
        return Script([position % 250 for position in range(submission.sampling.max_tokens)])

    first, second = (FakeScheduler(script=script, interval_s=0.005) for _ in range(2))
    await first.start()
    async with (
        second,
        running_stack(schedulers=[first, second], streams={"max_unread_tokens": 5000}) as stack,
        grpc.aio.insecure_channel(
            stack.address,
            options=[("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)],
        ) as channel,
    ):
        limits = {"max_model_len": 2 * num_tokens, "num_kv_blocks": num_tokens}
        for scheduler, name in ((first, "first"), (second, "second")):
            # So slowly that it is paused only when nothing more can be written to it.
            scheduler.tokens_per_step = 500
            scheduler.set_workers(worker(worker_id=name, **limits))
        await stack.until(
            lambda: [r.num_kv_blocks for r in stack.router.pool.reports()] == [num_tokens] * 2
        )
        stack.stub = inference_pb2_grpc.InferenceStub(channel)
        slow = stack.generate(sampling={"max_tokens": num_tokens})
        messages = [await slow.read()]
        await stack.until(lambda: stack.router.num_paused == 1)
        assert not second.submissions
        await first.stop()
        await stack.until(lambda: not stack.router.num_in_flight)
        assert (stack.router.num_queued, stack.router.num_paused) == (0, 1)
        assert not second.submissions
        messages += await stack.rest(slow)
        tokens = [token for m in messages for o in m.outputs for token in o.token_ids]
        assert tokens == [position % 250 for position in range(num_tokens)]
        assert {s.epoch for s in second.submissions} == {2}


@pytest.mark.parametrize("seed", range(2))
async def test_a_mixed_crowd_with_a_scheduler_that_comes_and_goes_leaves_nothing(seed):
    chance = random.Random(seed)
    first = FakeScheduler(script=counts_up, interval_s=0.001)
    await first.start()
    async with (
        FakeScheduler(script=counts_up, interval_s=0.001) as second,
        running_stack(schedulers=[first, second]) as stack,
    ):
        second.set_workers(worker(worker_id="worker-1"))
        await stack.until(lambda: len(stack.router.pool.reports()) == 2)

        async def one(number):
            await asyncio.sleep(chance.random() * 0.5)
            call = stack.generate(request_id=f"r-{number}", sampling={"seed": number})
            if number % 5 == 0:
                call.cancel()
                return
            messages = [m async for m in call]
            assert messages[-1].outputs[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH
            text = "".join(o.text for m in messages for o in m.outputs)
            assert text == f"r-{number} " * (number % 5 + 1)

        async def shake():
            address = first.address
            for _ in range(3):
                await asyncio.sleep(0.1)
                await first.stop()
                await asyncio.sleep(0.05)
                await first.start(address)

        await asyncio.gather(shake(), *(one(number) for number in range(120)))
        await stack.until(lambda: stack.is_empty)
        await stack.until(lambda: not second.live and not first.live)
    await first.stop()


async def test_errors_of_one_do_not_reach_its_neighbours(stack):
    stack.scheduler.script = lambda s: Script(
        [65] * 5,
        reason=common_pb2.FINISH_REASON_ERROR
        if s.request_id.startswith("bad")
        else common_pb2.FINISH_REASON_LENGTH,
    )

    async def one(request_id):
        try:
            return await stack.text(request_id=request_id)
        except grpc.aio.AioRpcError as error:
            return error.code()

    names = [f"{kind}-{i}" for i in range(20) for kind in ("bad", "good")]
    results = await asyncio.gather(*(one(name) for name in names))
    assert set(results[0::2]) == {grpc.StatusCode.INTERNAL}
    assert set(results[1::2]) == {TOKENIZER.decode([65] * 5)}
