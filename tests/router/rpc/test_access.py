"""Tenants with API keys: nobody sees, ends, resumes or detects the requests of another."""

import asyncio
import contextlib
import re

import grpc.aio
import pytest

from headrace.service.errors import from_rpc_error
from headrace.service.keys import Caller, make_key, section
from headrace.service.serving import ServingConfig
from headrace.status.embedded import EmbeddedStore
from headrace.v1 import inference_pb2, steps_pb2
from router.rpc.access import TENANT_METHODS, Access
from tests.router.fake_scheduler import FakeScheduler
from tests.router.stack import running_stack
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import running_scheduler

SERVICE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
OWNERS = {"acme": "acme", "globex": "globex", "root": ""}
BODY = {"text": "hello", "sampling": {"max_tokens": 8}}

# For each method that takes a request id: the call of somebody who asks for this id.
CALLS = {
    "Generate": lambda name: inference_pb2.GenerateRequest(request_id=name, **BODY),
    "Resume": lambda name: inference_pb2.ResumeRequest(request_id=name),
    "Abort": lambda name: inference_pb2.AbortRequest(request_ids=[name]),
    "GetStatus": lambda name: inference_pb2.GetStatusRequest(request_id=name),
    "Explain": lambda name: inference_pb2.ExplainRequest(request_id=name),
}
# Methods without an id that say the same to everybody.
OPEN = {"ListModels"}
# All that show the pool: each refuses its caller, or answers at least once.
ADMIN_ONLY = {
    "GetPool": inference_pb2.GetPoolRequest(),
    "AuditPool": inference_pb2.AuditPoolRequest(),
    "WatchSteps": steps_pb2.WatchStepsRequest(),
    "GetStepBatch": steps_pb2.GetStepBatchRequest(worker_id="w", position=1),
    "UpdateWorker": inference_pb2.UpdateWorkerRequest(),
    "ListQueue": steps_pb2.ListQueueRequest(),
}


def test_every_method_has_a_rule():
    """A new method must be added to one of these, and to `access`, on purpose."""
    assert {method.name for method in SERVICE.methods} == CALLS.keys() | OPEN | ADMIN_ONLY.keys()
    assert {name.rpartition("/")[2] for name in TENANT_METHODS} == CALLS.keys() | OPEN


class Callers:
    """A router for callers with keys, and what each of them is answered."""

    def __init__(self, stack, secrets):
        self.stack, self._secrets = stack, secrets

    def call(self, who, method, request):
        metadata = [("authorization", f"Bearer {self._secrets[who]}")]
        return getattr(self.stack.stub, method)(request, metadata=metadata, timeout=60)

    async def answer(self, who, method, request):
        """The messages, or code, reason and text of the refusal."""
        call = self.call(who, method, request)
        try:
            if method == "WatchSteps":
                return [await anext(aiter(call))]
            if isinstance(call, grpc.aio.UnaryStreamCall):
                return [message async for message in call]
            return [await call]
        except grpc.aio.AioRpcError as error:
            found = from_rpc_error(error)
            return (found.code.name, found.reason, found.message)

    async def reason(self, who, method, request):
        answer = await self.answer(who, method, request)
        return answer[1] if isinstance(answer, tuple) else ""


def keys_file(folder, limits=""):
    secrets = {name: make_key() for name in OWNERS}
    file = folder / "keys.toml"
    sections = [section(name, secrets[name], tenant, None) for name, tenant in OWNERS.items()]
    file.write_text("".join(sections) + limits)
    return ServingConfig(api_keys_file=str(file)), secrets


@contextlib.asynccontextmanager
async def running(folder, limits="", **settings):
    serving, secrets = keys_file(folder, limits)
    async with running_stack(serving=serving, **settings) as stack:
        yield Callers(stack, secrets)


@pytest.fixture
async def callers(tmp_path):
    """Of acme's requests, "live" goes on and "over" has ended."""
    async with EmbeddedStore() as server:
        scheduler = FakeScheduler(interval_s=0.005)
        async with running(tmp_path, scheduler=scheduler, store_url=server.url) as made:
            await made.answer("acme", "Generate", CALLS["Generate"]("over"))
            scheduler.limit = 3
            call = made.call("acme", "Generate", CALLS["Generate"]("live"))
            await call.read()
            async with asyncio.timeout(20):
                for name in ("over", "live"):
                    while await made.reason("acme", "GetStatus", CALLS["GetStatus"](name)):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            yield made
            scheduler.limit = 10**9
            scheduler.resume()
            call.cancel()


@pytest.mark.parametrize("name", ["over", "live"])
@pytest.mark.parametrize("method", CALLS.keys() - {"Generate"})
@pytest.mark.parametrize("who", ["globex", "root"])
async def test_a_request_of_another_tenant_is_an_unknown_one(callers, who, method, name):
    foreign = await callers.answer(who, method, CALLS[method](name))
    unknown = await callers.answer(who, method, CALLS[method]("none"))
    assert str(foreign).replace(name, "none") == str(unknown)
    assert "NOT_FOUND" in str(foreign)
    assert await callers.reason("acme", "GetStatus", CALLS["GetStatus"]("live")) == ""


@pytest.mark.parametrize("name", ["over", "live"])
async def test_the_id_of_another_tenant_s_request_is_free(callers, name):
    scheduler = callers.stack.scheduler
    before = len(scheduler.submissions)
    call = callers.call("globex", "Generate", CALLS["Generate"](name))
    first = await call.read()
    assert first.request_id == name
    assert scheduler.submissions[before].tenant == "globex"
    assert len(scheduler.submissions) == before + 1
    call.cancel()
    status = await callers.answer("acme", "GetStatus", CALLS["GetStatus"]("live"))
    assert status[0].tenant == "acme"


@pytest.mark.parametrize(
    ("who", "name"), [("acme", "over"), ("root", "acme/over")], ids=["owner", "administrator"]
)
async def test_the_owner_and_an_administrator_see_and_repeat_a_request(callers, who, name):
    for method in ("GetStatus", "Explain"):
        answer = await callers.answer(who, method, CALLS[method](name))
        assert [message.request_id for message in answer] == [name], method
    live = name.replace("over", "live")
    call = callers.call(who, "Resume", CALLS["Resume"](live))
    assert (await call.read()).request_id == live
    again = callers.call("acme", "Generate", CALLS["Generate"]("live"))
    assert (await again.read()).outputs[0].first_token_position == 0
    assert {s.request_id for s in callers.stack.scheduler.submissions} == {"acme/over", "acme/live"}
    again.cancel()


@pytest.mark.parametrize(("who", "name"), [("acme", "live"), ("root", "acme/live")])
async def test_the_owner_and_an_administrator_end_a_request(callers, who, name):
    answer = await callers.answer(who, "Abort", CALLS["Abort"](name))
    assert answer[0].outcomes[0].result == inference_pb2.AbortOutcome.RESULT_ABORTED
    assert answer[0].outcomes[0].request_id == name


async def test_a_tenant_ends_all_that_its_keys_have_made_and_nothing_else(callers):
    theirs = inference_pb2.GenerateRequest(request_id="gateway", tenant="acme", **BODY)
    gateway = callers.call("root", "Generate", theirs)
    await gateway.read()
    abort = inference_pb2.AbortRequest(tenant="acme")
    assert await callers.reason("globex", "Abort", abort) == "OTHER_TENANT"
    answer = await callers.answer("acme", "Abort", abort)
    assert [outcome.request_id for outcome in answer[0].outcomes] == ["live"]
    answer = await callers.answer("root", "Abort", abort)
    assert "gateway" in [outcome.request_id for outcome in answer[0].outcomes]


@pytest.mark.parametrize(
    ("who", "fields", "reason"),
    [
        ("acme", {"tenant": "globex"}, "OTHER_TENANT"),
        ("acme", {"tenant": "acme"}, ""),
        ("acme", {"request_id": "globex/1"}, "INVALID_FIELD"),
        ("acme", {"request_id": "acme/1"}, "INVALID_FIELD"),
        ("root", {"tenant": "globex"}, ""),
        ("root", {"tenant": "globex", "request_id": "globex/1"}, ""),
        ("root", {"tenant": "acme", "request_id": "globex/1"}, "INVALID_FIELD"),
    ],
)
async def test_who_may_send_for_whom(tmp_path, who, fields, reason):
    async with running(tmp_path) as callers:
        request = inference_pb2.GenerateRequest(**BODY, **fields)
        assert await callers.reason(who, "Generate", request) == reason
        sent = [s.tenant for s in callers.stack.scheduler.submissions]
        assert sent == ([] if reason else [fields["tenant"]])


async def test_what_shows_the_pool_is_for_administrators(tmp_path):
    async with running(tmp_path) as callers:
        for method, request in ADMIN_ONLY.items():
            assert await callers.reason("acme", method, request) == "ADMIN_ONLY"
            # An update that says nothing is wrong, whoever sends it.
            wrong = {"UpdateWorker": "INVALID_FIELD", "GetStepBatch": "UNKNOWN_STEP"}
            reason = wrong.get(method, "")
            assert await callers.reason("root", method, request) == reason
        assert await callers.reason("acme", "ListModels", inference_pb2.ListModelsRequest()) == ""


async def test_a_key_has_limits_of_its_own(tmp_path):
    limits = "[keys.acme.limits]\nmax_live_requests = 1\nmin_priority = 0\n"
    scheduler = FakeScheduler(interval_s=0.005)
    scheduler.limit = 3
    async with running(tmp_path, limits, scheduler=scheduler) as callers:
        call = callers.call("acme", "Generate", CALLS["Generate"]("1"))
        await call.read()
        refusal = await callers.answer("acme", "Generate", CALLS["Generate"]("2"))
        assert refusal[1] == "TENANT_TOO_MANY_LIVE"
        assert "of this key" in refusal[2]
        other = callers.call("globex", "Generate", CALLS["Generate"]("3"))
        await other.read()
        call.cancel()
        other.cancel()
        scheduler.limit = 10**9
        await callers.stack.until(lambda: callers.stack.is_empty)
        urgent = inference_pb2.GenerateRequest(priority=-1, **BODY)
        assert "priority: must be at least 0" in str(
            await callers.answer("acme", "Generate", urgent)
        )
        assert await callers.reason("acme", "Generate", CALLS["Generate"]("2")) == ""


async def test_tokens_are_charged_to_the_key(tmp_path):
    limits = "[keys.acme.limits]\ntokens_per_minute = 8\n"
    async with running(tmp_path, limits) as callers:
        reasons = [await callers.reason("acme", "Generate", CALLS["Generate"](i)) for i in "123"]
    assert reasons == ["", "TENANT_RATE", "TENANT_RATE"]


async def test_an_explanation_names_no_request_of_others(tmp_path):
    """Over a real scheduler, whose worker has too few blocks for two requests."""
    serving, secrets = keys_file(tmp_path)
    worker = FakeGpuWorker(model="tiny", num_kv_blocks=12)
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with running_stack(schedulers=[scheduler], serving=serving) as stack:
            callers = Callers(stack, secrets)
            request = {"token_ids": {"ids": range(20, 30)}, "sampling": {"max_tokens": 28}}
            worker.hold()
            answers = [
                asyncio.create_task(
                    callers.answer(
                        who, "Generate", inference_pb2.GenerateRequest(request_id=who[0], **request)
                    )
                )
                for who in ("acme", "globex")
            ]
            # Both must want the same blocks at the same time.
            await stack.until(lambda: len(scheduler.switchboard.requests) == 2)
            await worker.release()
            await asyncio.gather(*answers)
            seen = [
                str(await callers.answer(who, "Explain", CALLS["Explain"](who[0])))
                for who in ("acme", "globex")
            ]
            told = [
                str(await callers.answer("root", "Explain", CALLS["Explain"](name)))
                for name in ("acme/a", "globex/g")
            ]
    assert any("preempted: another request needed" in text for text in seen)
    assert not any("acme/" in text or "globex/" in text for text in seen)
    # Either may be the younger one, which gives way.
    assert re.search(r"preempted: (acme/a|globex/g) needed", "".join(told))


def test_an_explanation_keeps_the_names_of_a_tenant_s_own_requests():
    own = inference_pb2.ExplainResponse(request_id="acme/1")
    for other in ("acme/2", "globex/3", "4"):
        own.events.add(detail=f"preempted: {other} needed 3 KV blocks; 9 computed tokens lost")
    shown = Access(Caller("k", "acme")).explanation(own)
    assert shown.request_id == "1"
    assert [event.detail.split(" needed ")[0] for event in shown.events] == [
        "preempted: 2", "preempted: another request", "preempted: another request",
    ]  # fmt: skip
