"""A client that does not read, from its socket to the worker's KV blocks.

Router and scheduler as they are, over real gRPC; the worker runs no model, but notices every KV
block that it should not have lost. The slow client's own buffer is as small as gRPC lets it be.
"""

import asyncio
import contextlib

import grpc
import grpc.aio
import pytest

from headrace.messages import to_explanation
from headrace.service.errors import from_rpc_error
from headrace.status.embedded import EmbeddedStore
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from router.core.pauses import UnreadLimits
from scheduler.config import SchedulerSettings
from tests.headrace.time_spent import seconds_by_stage
from tests.router.stack import running_stack
from tests.router.tiny_models import byte_level_model
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import running_scheduler, until

PROMPT, QUICK = [11, 12, 13, 14, 15], [21, 22, 23]
NUM_TOKENS = 1500
MAX_UNREAD = 100
# Of tokens that come with 20 alternatives each, so many may wait as with this limit of plain ones.
MAX_UNREAD_TOKENS = 6_100
assert UnreadLimits(max_unread_tokens=MAX_UNREAD_TOKENS).of(20) == MAX_UNREAD
NUM_BLOCKS = 256
SMALL_WINDOW = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 16_384),
    ("grpc.use_local_subchannel_pool", 1),
]


class Everything:
    """The services, and a channel of a client with little room."""

    def __init__(self, stack, scheduler, worker, channel):
        self.router, self.scheduler, self.worker = stack.router, scheduler, worker
        self.stack = stack
        self._stub = inference_pb2_grpc.InferenceStub(channel)

    def ask(self, *, request_id="", num_tokens=NUM_TOKENS, stub=None, **fields):
        """The slow client's request; log probabilities make its messages large."""
        sampling = common_pb2.SamplingParams(max_tokens=num_tokens, logprobs=20)
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=sampling,
            **fields,
        )
        return (stub or self._stub).Generate(request, timeout=60)

    async def quick(self):
        """Somebody who reads: 40 tokens."""
        answer = await self.stack.answer(token_ids={"ids": QUICK}, sampling={"max_tokens": 40})
        assert tokens_of(answer) == expected_tokens(QUICK, 40)

    @property
    def slow_completion(self):
        (request,) = (
            r for r in self.router.live._requests.values() if len(r.prompt_token_ids) == 5
        )
        return request.completions[0]

    @property
    def load(self):
        return self.scheduler.pool.snapshot()[0]

    @property
    def report(self):
        """Free blocks, running and waiting requests, as the router last heard."""
        (report,) = self.router.pool.reports()
        return report.num_free_kv_blocks, report.num_running, report.num_waiting

    async def paused(self):
        """Wait until the slow client's request is set aside, and what was in flight has come."""
        (managed,) = self.scheduler.pool._workers
        await until(lambda: managed.engine is not None and managed.engine.num_paused == 1)
        await until(lambda: managed.engine is not None and not managed.engine._in_flight)
        requests, completion = self.scheduler.switchboard.requests, self.slow_completion
        live = requests.find(completion.request_id)
        await until(lambda: len(completion.token_ids) == requests.num_generated(live))


@contextlib.asynccontextmanager
async def everything(depth=1, store_url="", store=None, **streams):
    worker = FakeGpuWorker(
        block_size=16, num_kv_blocks=NUM_BLOCKS, max_model_len=2048, max_num_seqs=8
    )
    await worker.start()
    settings = SchedulerSettings(pipeline_depth=depth)
    async with running_scheduler([worker], settings, store=store) as scheduler:
        await scheduler.ready()
        async with (
            running_stack(
                schedulers=[scheduler],
                models={"fake": byte_level_model()},
                streams={"max_unread_tokens": MAX_UNREAD_TOKENS} | streams,
                store_url=store_url,
            ) as stack,
            grpc.aio.insecure_channel(stack.address, options=SMALL_WINDOW) as channel,
        ):
            yield Everything(stack, scheduler, worker, channel)


def tokens_of(messages):
    return [token for m in messages for output in m.outputs for token in output.token_ids]


def text_of(messages):
    return "".join(output.text for m in messages for output in m.outputs)


@pytest.mark.parametrize("depth", [1, 2])
async def test_a_client_that_does_not_read_pauses_its_request_alone_and_loses_no_token(depth):
    async with everything(depth) as all_of_it:
        always_read = [m async for m in all_of_it.ask(stub=all_of_it.stack.stub)]
        slow = all_of_it.ask(request_id="slow")
        first = await slow.read()
        await all_of_it.paused()
        completion = all_of_it.slow_completion
        num_tokens = len(completion.token_ids)
        # What was in flight has come, and no more does while others are served.
        await asyncio.gather(*(all_of_it.quick() for _ in range(8)))
        assert MAX_UNREAD < completion.num_unread < 2 * MAX_UNREAD
        assert len(completion.logprobs) == completion.num_unread
        assert len(completion.token_ids) == num_tokens < NUM_TOKENS
        assert (all_of_it.load.num_free_blocks, all_of_it.load.num_waiting) == (NUM_BLOCKS, 0)
        await until(lambda: all_of_it.report == (NUM_BLOCKS, 0, 0))
        pool = await all_of_it.stack.stub.GetPool(inference_pb2.GetPoolRequest())
        assert (pool.num_in_flight, pool.num_paused) == (1, 1)
        assert all_of_it.router.num_live == 1
        messages = [first, *await all_of_it.stack.rest(slow)]
        assert tokens_of(messages) == expected_tokens(PROMPT, NUM_TOKENS)
        positions = [output.first_token_position for m in messages for output in m.outputs]
        assert positions == sorted(positions)
        assert text_of(messages) == text_of(always_read)
        assert tokens_of(always_read) == tokens_of(messages)
        trailer = dict(await slow.trailing_metadata())
        assert float(trailer["x-headrace-paused-s"]) > 0
        assert trailer["x-headrace-preemptions"] == "0"
        kinds = [event.kind for event in all_of_it.scheduler.pool.explain("slow").events]
        names = [kind.name for kind in kinds]
        assert names.count("PAUSED") == names.count("CONTINUED") >= 1
        told = inference_pb2.ExplainRequest(request_id="slow")
        history = to_explanation(await all_of_it.stack.stub.Explain(told))
        assert seconds_by_stage(history)["PAUSED"] > float(trailer["x-headrace-paused-s"]) / 2


async def test_its_status_says_that_it_is_paused_and_how_it_ended():
    async with (
        EmbeddedStore() as embedded,
        StatusStore(embedded.url, Writer.SCHEDULER) as store,
    ):
        writing = asyncio.create_task(store.run())
        async with everything(store_url=embedded.url, store=store) as all_of_it:

            async def status():
                assert await store.flush(10)
                request = inference_pb2.GetStatusRequest(request_id="slow")
                return (await all_of_it.stack.stub.GetStatus(request)).state

            slow = all_of_it.ask(request_id="slow")
            await slow.read()
            await all_of_it.paused()
            assert await status() == "PAUSED"
            await all_of_it.stack.rest(slow)
            assert await status() == "LENGTH_CAPPED"
        writing.cancel()
        await asyncio.wait([writing])


async def test_a_client_that_reads_in_bursts_gets_everything_too():
    async with everything(depth=2) as all_of_it:
        slow = all_of_it.ask()
        messages = []
        while (message := await slow.read()) is not grpc.aio.EOF:
            messages.append(message)
            if len(messages) % 3 == 0 and len(tokens_of(messages)) < NUM_TOKENS - 800:
                await all_of_it.paused()
        assert tokens_of(messages) == expected_tokens(PROMPT, NUM_TOKENS)


async def test_a_client_that_leaves_while_it_is_paused_leaves_nothing():
    async with everything() as all_of_it:
        slow = all_of_it.ask()
        await slow.read()
        await all_of_it.paused()
        slow.cancel()
        await until(lambda: all_of_it.stack.is_empty)
        await until(lambda: not len(all_of_it.scheduler.switchboard.requests))


async def test_a_worker_lost_in_a_pause_costs_the_client_nothing():
    async with everything() as all_of_it:
        slow = all_of_it.ask()
        first = await slow.read()
        await all_of_it.paused()
        await all_of_it.worker.kill()
        await until(lambda: bool(all_of_it.scheduler.pool._stranded))
        await all_of_it.worker.start()
        await all_of_it.paused()
        messages = [first, *await all_of_it.stack.rest(slow)]
        assert tokens_of(messages) == expected_tokens(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize(
    ("streams", "why"),
    [
        ({"slow_client": "cut"}, f"more than {MAX_UNREAD} of its tokens are unread"),
        ({"max_pause_s": 0.3}, r"paused for 0\.3 s in one go"),
    ],
)
async def test_a_client_that_is_not_waited_for_is_told_why(streams, why):
    async with everything(**streams) as all_of_it:
        slow = all_of_it.ask()
        await slow.read()
        await until(lambda: not len(all_of_it.scheduler.switchboard.requests))
        await all_of_it.quick()
        with pytest.raises(grpc.aio.AioRpcError, match=why) as caught:
            await all_of_it.stack.rest(slow)
        error = from_rpc_error(caught.value)
        assert (error.code, error.reason) == (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "SLOW_CLIENT",
        )
