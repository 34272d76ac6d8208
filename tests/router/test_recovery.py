"""Requests whose services died: which are taken up without a caller, and how often."""

import asyncio
import contextlib
import time

import grpc
import pytest
import redis.asyncio

from headrace.service.errors import ServiceError, unavailable
from headrace.status.records import Update
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore
from headrace.v1 import common_pb2, inference_pb2, record_pb2
from router.__main__ import drain
from router.rpc import stored_spec
from tests.router.cluster import running_cluster
from tests.router.putting_together import Client, error_of, script

ALWAYS = inference_pb2.GenerateRequest.RECOVER_ALWAYS


class Graveyard:
    """Writes what dead routers and schedulers have left behind."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.num_specs = 0

    async def spec_of(self, request_id, **fields):
        """The spec of a request that was really admitted."""
        for scheduler in self.cluster.schedulers:
            scheduler.limit = 1
        # A name of its own: a model that ended before its cancellation would be read again.
        self.num_specs += 1
        name = f"model-{self.num_specs}"
        call = self.cluster.a.generate(request_id=name, sampling={"max_tokens": 12, "seed": 7})
        await call.read()
        request = self.cluster.a.router.calls.get(name).request
        spec = record_pb2.RequestSpec.FromString(stored_spec.encode(request))
        call.cancel()
        await self.cluster.a.until(lambda: self.cluster.a.is_empty)
        for scheduler in self.cluster.schedulers:
            scheduler.limit = 100
        spec.request.request_id = request_id
        for name, value in fields.items():
            setattr(spec.request if name == "recover" else spec, name, value)
        if "deadline_unix_s" in fields:
            spec.request.deadline.FromNanoseconds(int(spec.deadline_unix_s * 1e9))
        return spec

    async def bury(self, spec, *, router="router-a", is_dispatched=True, scheduler="old"):
        """A request of an earlier incarnation of a router, which got to a scheduler's one."""
        shared = {
            "request_id": spec.request.request_id,
            "create_time_unix_s": spec.arrival_time_unix_s,
            "router_id": router,
            "router_incarnation": "dead",
        }
        async with (
            self._store(Writer.ROUTER) as routers,
            self._store(Writer.SCHEDULER) as schedulers,
        ):
            data = spec.SerializeToString()
            now = {"time_unix_s": time.time()}
            await self._write(routers, State.QUEUED, spec=data, num_completions=1, **shared, **now)
            if is_dispatched:
                sent = {"scheduler_id": "one", "worker_id": "worker-one"}
                await self._write(routers, State.DISPATCHED, **shared, **sent, **now)
                sent["scheduler_incarnation"] = scheduler
                await self._write(schedulers, State.RUNNING, **shared, **sent, **now)

    @contextlib.asynccontextmanager
    async def _store(self, writer):
        async with StatusStore(self.cluster.url, writer) as store:
            running = asyncio.create_task(store.run())
            yield store
            running.cancel()
            await asyncio.wait([running])

    @staticmethod
    async def _write(store, state, **fields):
        store.record(Update(state=state, **fields))
        assert await store.flush(20)

    async def state_of(self, request_id):
        (record,) = await self.cluster.b.store.records(request_id)
        return record

    async def until_ended(self, request_id):
        async with asyncio.timeout(20):
            while True:
                records = await self.cluster.b.store.records(request_id)
                if records and records[0].state.is_final:
                    return records[0]
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def graveyard(**settings):
    async with running_cluster(script=script, **settings) as cluster:
        yield Graveyard(cluster), cluster
        for one in (cluster.a, cluster.b):
            await one.until(lambda one=one: one.is_empty)


async def test_after_a_restart_of_everything_a_request_is_finished_and_can_be_read():
    async with graveyard() as (yard, cluster):
        await yard.bury(await yard.spec_of("lost"))
        await cluster.b.recovery.sweep()
        assert (await yard.state_of("lost")).state is State.RUNNING
        await cluster.a.recovery.sweep()
        record = await yard.until_ended("lost")
        assert (record.state, record.epoch, record.num_recoveries) == (State.LENGTH_CAPPED, 2, 1)
        whole, client = Client(1), Client(1)
        await whole.read(cluster.b.generate(request_id="w", sampling={"max_tokens": 12, "seed": 7}))
        await client.read(cluster.b.resume("lost", 0))
        assert client == whole


async def test_what_its_dead_router_had_not_sent_is_recovered_by_the_next_of_its_name():
    async with graveyard() as (yard, cluster):
        await yard.bury(await yard.spec_of("lost"), is_dispatched=False)
        await cluster.a.recovery.sweep()
        assert (await yard.until_ended("lost")).state is State.LENGTH_CAPPED


@pytest.mark.parametrize(
    ("fields", "scheduler", "is_recovered"),
    [
        ({}, "old", False),
        ({"deadline_unix_s": 4e9}, "old", True),
        ({"deadline_unix_s": 4e9}, "one", False),
        ({"recover": ALWAYS}, "old", True),
        ({"recover": ALWAYS}, "one", True),
    ],
)
async def test_of_another_router_only_what_is_urgent_is_recovered(fields, scheduler, is_recovered):
    async with graveyard() as (yard, cluster):
        await yard.bury(await yard.spec_of("lost", **fields), scheduler=scheduler)
        await cluster.b.recovery.sweep()
        if is_recovered:
            assert (await yard.until_ended("lost")).state is State.LENGTH_CAPPED
        else:
            assert (await yard.state_of("lost")).epoch == 1
            assert await cluster.b.rest(cluster.b.resume("lost", 0))


async def test_a_request_with_a_passed_deadline_ends_with_it():
    async with graveyard() as (yard, cluster):
        await yard.bury(await yard.spec_of("lost", deadline_unix_s=time.time() - 1.0))
        await cluster.a.recovery.sweep()
        record = await yard.until_ended("lost")
        assert record.state in {State.DEADLINE, State.EXPIRED, State.ABORTED}


async def test_two_routers_that_look_at_once_recover_a_request_once():
    async with graveyard() as (yard, cluster):
        for number in range(10):
            await yard.bury(await yard.spec_of(f"lost-{number}", recover=ALWAYS))
        await asyncio.gather(cluster.a.recovery.sweep(), cluster.b.recovery.sweep())
        for number in range(10):
            record = await yard.until_ended(f"lost-{number}")
            assert (record.state, record.num_recoveries) == (State.LENGTH_CAPPED, 1)
        sent = [s.request_id for one in cluster.schedulers for s in one.submissions]
        assert sorted(i for i in sent if "lost" in i) == [f"lost-{n}" for n in range(10)]


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_claim_that_the_store_does_not_answer_loses_nothing(monkeypatch, is_late):
    async with graveyard() as (yard, cluster):
        await yard.bury(await yard.spec_of("lost", recover=ALWAYS))
        store, claim, asked = cluster.b.store, cluster.b.store.claim, []

        async def unanswered(*args, **named):
            asked.append(lambda: claim(*args, **named))
            if not is_late:
                await asked[0]()
            raise unavailable("STORE_UNAVAILABLE", "no answer in time", 1.0)

        with monkeypatch.context() as patch:
            patch.setattr(store, "claim", unanswered)
            with pytest.raises(ServiceError):
                await cluster.b.recovery.sweep()
        if is_late:
            assert await asked[0]()
        await cluster.b.recovery.sweep()
        assert (await yard.until_ended("lost")).state is State.LENGTH_CAPPED
        await cluster.b.recovery.sweep()
        assert not cluster.b.recovery._take_ups.in_doubt


@pytest.mark.parametrize("state", [State.ABORTED, State.ERROR, State.QUEUED])
async def test_a_router_learns_from_the_store_that_its_request_is_no_longer_its_own(state):
    async with running_cluster(script=script) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 3
        call = cluster.a.generate(request_id="r", sampling={"max_tokens": 12})
        await call.read()
        await cluster.flush()
        stored = await cluster.b.store.load("r")
        other = {"router_id": "router-b", "router_incarnation": "dead"}
        assert await cluster.b.store.claim(stored, state, **other)
        # So that the router sends the request again.
        for scheduler in cluster.schedulers:
            scheduler.break_connections()
        if state is State.ABORTED:
            *_, last = await cluster.a.rest(call)
            assert last.outputs[0].finish_reason == common_pb2.FINISH_REASON_ABORTED
        else:
            assert (await error_of(call)).reason == "CONTESTED"
        await cluster.a.until(lambda: cluster.a.is_empty)
        assert (await cluster.b.store.load("r")).completions[0].record.state is state


async def test_a_repeated_call_gets_an_answer_of_which_the_store_lost_tokens():
    async with graveyard() as (yard, cluster):
        fields = {"request_id": "w", "sampling": {"max_tokens": 12, "seed": 7}}
        whole, again = Client(1), Client(1)
        await whole.read(cluster.a.generate(**fields))
        await yard.until_ended("w")
        async with redis.asyncio.Redis.from_url(cluster.url) as store:
            assert await store.delete("headrace:2:{w}:tokens#0")
        assert (await error_of(cluster.b.resume("w", 0))).reason == "TOKENS_LOST"
        await again.read(cluster.b.generate(**fields))
        assert again == whole


async def test_of_an_aborted_request_the_store_need_not_have_everything():
    async with graveyard() as (yard, cluster):
        spec = await yard.spec_of("lost")
        spec.request.sampling.prompt_logprobs = 1
        spec.request.sampling.logprobs = 1
        await yard.bury(spec)
        stored = await cluster.a.store.load("lost")
        owner = {"router_id": "router-a", "router_incarnation": "dead-too"}
        assert await cluster.a.store.claim(stored, State.ABORTED, **owner)
        (last,) = await cluster.b.rest(cluster.b.resume("lost", 0))
        assert last.outputs[0].finish_reason == common_pb2.FINISH_REASON_ABORTED


async def test_a_request_that_was_recovered_too_often_fails():
    async with graveyard(recovery={"max_recoveries": 2}) as (yard, cluster):
        await yard.bury(await yard.spec_of("killer"))
        for _ in range(2):
            stored = await cluster.a.store.load("killer")
            owner = {"router_id": "router-a", "router_incarnation": "dead-too"}
            assert await cluster.a.store.claim(stored, State.QUEUED, **owner, is_recovery=True)
        await cluster.a.recovery.sweep()
        record = await yard.until_ended("killer")
        assert (record.state, record.detail) == (State.ERROR, "its services died 3 times")
        assert (await error_of(cluster.b.resume("killer", 0))).reason == "GENERATION_FAILED"


async def test_a_corrupt_record_is_an_error_to_a_caller_and_ends_the_request():
    async with graveyard() as (yard, cluster):
        spec = await yard.spec_of("corrupt")
        spec.prompt_token_ids = b"\xff" * 4
        await yard.bury(spec)
        error = await error_of(cluster.b.resume("corrupt", 0))
        assert (error.code, error.reason) == (grpc.StatusCode.DATA_LOSS, "CORRUPT_RECORD")
        await cluster.a.recovery.sweep()
        assert (await yard.until_ended("corrupt")).state is State.ERROR


@pytest.mark.parametrize("has_reader", [True, False])
async def test_a_router_that_shuts_down_hands_its_requests_over(has_reader):
    async with running_cluster(script=script) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 5
        client, whole = Client(2), Client(2)
        sampling = {"max_tokens": 40, "n": 2, "seed": 7}
        call = cluster.a.generate(request_id="r", sampling=sampling, keep_on_disconnect=True)
        await client.read(call, 2, 5)
        if not has_reader:
            call.cancel()
            await cluster.a.until(lambda: not cluster.a.router.calls.get("r").request.has_reader)
        await cluster.flush()
        await drain(cluster.a.router, 0.05, "handover")
        if has_reader:
            error = await error_of(call)
            assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "DRAINING")
        assert not any(scheduler.cancellations for scheduler in cluster.schedulers)
        again = cluster.b.resume("r", *client.positions)
        await cluster.b.until(lambda: sum(len(one.adopted) for one in cluster.schedulers) == 2)
        for scheduler in cluster.schedulers:
            scheduler.limit = 100
        await client.read(again)
        await whole.read(cluster.b.generate(request_id="w", sampling=sampling))
        assert client == whole


@pytest.mark.parametrize("ending", ["abort", "leave", "deadline", "stop string"])
async def test_an_end_that_a_lost_scheduler_did_not_record_is_recorded(ending):
    """Otherwise the request could be taken up again."""
    async with running_cluster(script=script) as cluster:
        for scheduler in cluster.schedulers:
            scheduler.limit = 3
            scheduler.heeds_cancellations = False
        fields = {"stop": ["ñb"]} if ending == "stop string" else {}
        timeout = 0.5 if ending == "deadline" else 20
        call = cluster.a.generate(
            request_id="r", sampling={"max_tokens": 9, **fields}, timeout=timeout
        )
        if ending != "stop string":
            await call.read()
        for scheduler in cluster.schedulers:
            scheduler.limit = 6
        if ending == "abort":
            await cluster.a.stub.Abort(inference_pb2.AbortRequest(request_ids=["r"]))
        if ending == "leave":
            call.cancel()
        else:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await cluster.a.rest(call)
        await cluster.a.until(lambda: not cluster.a.router.num_live)
        for scheduler in cluster.schedulers:
            scheduler.break_connections()
        yard = Graveyard(cluster)
        record = await yard.until_ended("r")
        assert (
            record.state
            in {
                "abort": {State.ABORTED},
                "leave": {State.ABORTED},
                "deadline": {State.EXPIRED, State.ABORTED},
                "stop string": {State.STOPPED},
            }[ending]
        )
        await cluster.a.until(lambda: not cluster.a.router._status._asked_by_handle)
