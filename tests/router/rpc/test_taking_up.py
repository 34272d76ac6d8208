"""Requests taken up at another router, through a real store."""

import asyncio
import random

import grpc
import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error, unavailable
from headrace.status.states import State
from headrace.v1 import common_pb2, inference_pb2
from tests.router.cluster import running_cluster
from tests.router.fake_scheduler import Script
from tests.router.putting_together import CASES, Client, error_of, fields_of, script, tokens_of


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_call_resumed_at_any_router_gives_the_undisturbed_bytes(case):
    rng = random.Random(str(case))
    async with running_cluster(script=script) as cluster:
        n = case.get("n", 1)
        whole = Client(n)
        await whole.read(cluster.a.generate(**fields_of(case, "whole")))
        num_tokens = min(whole.positions)
        for chance in range(8):
            limit = rng.randrange(1, num_tokens)
            for scheduler in cluster.schedulers:
                scheduler.limit = limit
                scheduler.tokens_per_step = rng.choice([1, 1, 2, 5])
                scheduler.journal.is_held = rng.random() < 0.3
            fields, client = fields_of(case, chance), Client(n)
            call = cluster.a.generate(**fields)
            await client.read(call, 1, limit)
            for _ in range(rng.randrange(1, 4)):
                await cluster.a.store.flush(20)
                await client.read(call, rng.randrange(4), limit)
                router = rng.choice([cluster.a, cluster.b])
                earlier, call = call, router.resume(fields["request_id"], *client.positions)
                await client.read(call, rng.randrange(2), limit)
                assert (await error_of(earlier)).reason == "RESUMED_ELSEWHERE"
            for scheduler in cluster.schedulers:
                scheduler.limit = 10**9
                scheduler.journal.is_held = False
            await client.read(call)
            assert client == whole
            await cluster.flush()
            # The end is read again, from anywhere.
            for router in (cluster.a, cluster.b):
                again = Client(n)
                await again.read(router.resume(fields["request_id"], *[0] * n))
                assert again == whole


async def test_a_finished_request_is_read_again_without_any_scheduler():
    async with running_cluster(script=script) as cluster:
        whole = Client(1)
        fields = fields_of({"sampling": {"stop": ["ENDx"]}, "echo": True}, "r")
        await whole.read(cluster.a.generate(**fields))
        await cluster.flush()
        num_submissions = sum(len(one.submissions) for one in cluster.schedulers)
        again, repeated = Client(1), Client(1)
        await again.read(cluster.b.resume("r-r", 0))
        await repeated.read(cluster.b.generate(**fields))
        assert again == repeated == whole
        assert sum(len(one.submissions) for one in cluster.schedulers) == num_submissions
        error = await error_of(cluster.b.generate("another", request_id="unlike r"))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        # The id is free for another message.
        assert await cluster.b.answer("another", request_id="r-r", sampling={"max_tokens": 2})


async def test_an_id_is_free_for_another_message_once_its_caller_has_read_the_end():
    """The store learns the end a moment later than the caller."""
    async with running_cluster(script=script) as cluster:
        for number in range(8):
            for message in ("one", "another"):
                assert await cluster.a.answer(
                    message, request_id=f"r{number}", sampling={"max_tokens": 4}
                )


async def test_a_repeated_call_attaches_at_another_router_and_another_message_is_refused():
    async with running_cluster(script=script) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 9
        call = cluster.a.generate(request_id="same", sampling={"max_tokens": 20})
        await cluster.a.until(lambda: any(one.live for one in cluster.schedulers))
        await cluster.flush()
        error = await error_of(cluster.b.generate("else", request_id="same"))
        assert error.reason == "DUPLICATE_REQUEST_ID"
        again = cluster.b.generate(request_id="same", sampling={"max_tokens": 20})
        await again.read()
        assert (await error_of(call)).reason == "RESUMED_ELSEWHERE"
        await cluster.b.until(lambda: sum(len(one.adopted) for one in cluster.schedulers) == 1)
        for scheduler in cluster.schedulers:
            scheduler.limit = 100
        await cluster.b.rest(again)


async def test_an_end_of_sequence_that_no_record_tells_of_is_found_again():
    """The tokens are in the store, the end is not: its last token is generated again."""

    def ends(submission):
        reason = common_pb2.FINISH_REASON_STOP
        return Script([*tokens_of("hello"), 2], reason=reason, stop_token_id=2)

    async with running_cluster(script=ends) as cluster:
        kept = cluster.a.generate(request_id="r", keep_on_disconnect=True)
        whole = Client(1)
        await whole.read(kept)
        await cluster.flush()
        record = (await cluster.a.store.records("r"))[0]
        assert record.state is State.STOPPED
        await _forget_the_end(cluster, "r")
        again = Client(1)
        await again.read(cluster.b.resume("r", 0))
        assert again == whole


async def _forget_the_end(cluster, request_id):
    """What the store has when a scheduler dies between the last tokens and the end."""
    import redis.asyncio

    async with redis.asyncio.Redis.from_url(cluster.url, decode_responses=True) as client:
        async for key in client.scan_iter(f"*{{{request_id}}}:status*"):
            await client.hset(key, "state", "RUNNING")


async def test_an_abort_at_another_router_ends_what_runs_and_what_waits():
    async with running_cluster(script=script) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 3
        running = cluster.a.generate(request_id="runs", sampling={"max_tokens": 20, "n": 2})
        await running.read()
        for scheduler in cluster.schedulers:
            scheduler.set_workers()
        await cluster.a.until(lambda: not cluster.a.router.pool.reports())
        waiting = cluster.a.generate(request_id="waits", sampling={"max_tokens": 20})
        await cluster.a.until(lambda: cluster.a.router.num_queued == 1)
        await cluster.flush()
        ids = ["runs", "waits", "nobody"]
        response = await cluster.b.stub.Abort(inference_pb2.AbortRequest(request_ids=ids))
        result = inference_pb2.AbortOutcome
        assert [o.result for o in response.outcomes] == [
            result.RESULT_ABORTED,
            result.RESULT_ABORTED,
            result.RESULT_NOT_FOUND,
        ]
        for call in (running, waiting):
            messages = await cluster.a.rest(call)
            reasons = {o.finish_reason for m in messages for o in m.outputs if o.finish_reason}
            assert reasons == {common_pb2.FINISH_REASON_ABORTED}
        await cluster.flush()
        response = await cluster.b.stub.Abort(inference_pb2.AbortRequest(request_ids=["runs"]))
        assert response.outcomes[0].result == result.RESULT_ALREADY_FINISHED


async def test_an_abort_is_recorded_before_it_is_answered():
    """Else a request whose scheduler and router die next would be taken up again."""
    async with running_cluster(script=script) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 3
        running = cluster.a.generate(request_id="r", sampling={"max_tokens": 20})
        await running.read()
        await cluster.flush()
        await cluster.a.stub.Abort(inference_pb2.AbortRequest(request_ids=["r"]))
        assert (await cluster.a.store.records("r"))[0].state is State.ABORTED
        await cluster.a.rest(running)


async def test_an_abort_that_only_the_store_could_answer_fails_while_the_store_is_away(monkeypatch):
    async with running_cluster(script=script) as cluster:

        async def away(request_id):
            raise unavailable("STORE_UNAVAILABLE", "away")

        monkeypatch.setattr(cluster.b.store, "load", away)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.b.stub.Abort(inference_pb2.AbortRequest(request_ids=["nobody"]))
        assert from_rpc_error(caught.value).reason == "STORE_UNAVAILABLE"


async def test_a_request_that_waits_in_one_router_is_aborted_from_another():
    async with running_cluster(script=script, waiting_allowance=0) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 3
            scheduler.workers[0].max_num_seqs = 1
            scheduler.set_workers(*scheduler.workers)
        await cluster.a.until(
            lambda: {r.max_num_seqs for r in cluster.a.router.pool.reports()} == {1}
        )
        calls = [cluster.a.generate(request_id=f"r-{k}") for k in range(3)]
        await cluster.a.until(lambda: cluster.a.router.num_queued == 1)
        (queued,) = [c.request_id for c in cluster.a.router._dispatcher.queue]
        await cluster.flush()
        await cluster.b.stub.Abort(inference_pb2.AbortRequest(request_ids=[queued]))
        messages = await cluster.a.rest(calls[int(queued[-1])])
        assert messages[-1].outputs[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
        for scheduler in cluster.schedulers:
            scheduler.limit = 100
        await asyncio.gather(
            *(cluster.a.rest(c) for k, c in enumerate(calls) if queued != f"r-{k}")
        )


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_caller_that_leaves_while_its_request_is_claimed_leaves_it_to_nobody(
    is_kept, monkeypatch
):
    """The claim is made all the same: the request goes on if it is kept, and ends if not."""
    async with running_cluster(script=script) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 3
        call = cluster.a.generate(request_id="r", keep_on_disconnect=is_kept)
        await call.read()
        await cluster.flush()
        is_claiming, may_claim = asyncio.Event(), asyncio.Event()
        claim = cluster.b.store.claim

        async def slow_claim(*args, **kwargs):
            is_claiming.set()
            await may_claim.wait()
            return await claim(*args, **kwargs)

        monkeypatch.setattr(cluster.b.store, "claim", slow_claim)
        again = cluster.b.resume("r", 0)
        reading = asyncio.create_task(again.read())
        await is_claiming.wait()
        again.cancel()
        await asyncio.wait([reading])
        may_claim.set()
        assert (await error_of(call)).reason == "RESUMED_ELSEWHERE"
        for scheduler in cluster.schedulers:
            scheduler.limit = 100
        async with asyncio.timeout(20):
            while not (await cluster.a.store.records("r"))[0].state.is_final:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        (record,) = await cluster.a.store.records("r")
        assert record.state is (State.LENGTH_CAPPED if is_kept else State.ABORTED)
