"""Services of different versions: which work together, and what the others say."""

import asyncio
import contextlib

import pytest

from headrace.service import versions
from headrace.service.channels import open_channel
from headrace.service.errors import ServiceError, from_rpc_error
from headrace.v1 import inference_pb2, inference_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc
from tests.headrace.other_version import OtherVersion, release, with_unknown_fields
from tests.router.fake_scheduler import MODEL, FakeScheduler
from tests.router.stack import running_stack
from tests.scheduler.fake_gpuworker import FakeGpuWorker, expected_tokens
from tests.scheduler.harness import running_scheduler

PROMPT = list(range(20, 53))


@contextlib.asynccontextmanager
async def chain(make_between):
    """A router, a scheduler and a worker, with something between each two of them."""
    async with contextlib.AsyncExitStack() as stack:
        worker = FakeGpuWorker(model=MODEL)
        await worker.start()
        worker_seen = await stack.enter_async_context(make_between(worker.address))
        worker.address = worker_seen.address
        scheduler = await stack.enter_async_context(running_scheduler([worker], has_company=True))
        await scheduler.ready()
        between = await stack.enter_async_context(make_between(scheduler.address))
        router = await stack.enter_async_context(running_stack(schedulers=[between]))
        front = await stack.enter_async_context(make_between(router.address))
        channel = await stack.enter_async_context(open_channel(front.address))
        yield inference_pb2_grpc.InferenceStub(channel), (worker_seen, between, front)


@pytest.mark.parametrize(
    "spoil", [lambda data: data, with_unknown_fields], ids=["release 0.1.0", "newer"]
)
async def test_services_of_neighbouring_versions_do_all_their_work(spoil):
    pool = release("0.1.0")
    async with (
        asyncio.timeout(60),
        chain(lambda target: OtherVersion(target, pool, spoil)) as (stub, proxies),
    ):
        request = inference_pb2.GenerateRequest(
            request_id="1", token_ids={"ids": PROMPT}, sampling={"max_tokens": 9}
        )
        answer = [message async for message in stub.Generate(request)]
        tokens = [t for message in answer for o in message.outputs for t in o.token_ids]
        assert tokens == expected_tokens(PROMPT, 9)
        explained = await stub.Explain(inference_pb2.ExplainRequest(request_id="1"))
        assert explained.events[-1].kind == "FINISHED"
        aborted = await stub.Abort(inference_pb2.AbortRequest(request_ids=["1"]))
        assert aborted.outcomes[0].result == inference_pb2.AbortOutcome.RESULT_ALREADY_FINISHED
        found = await stub.GetPool(inference_pb2.GetPoolRequest())
        # What the earlier release does not have is empty.
        assert [(w.worker_id, w.version) for w in found.workers] == [("w0", "")]
        audit = await stub.AuditPool(inference_pb2.AuditPoolRequest())
        assert not audit.workers[0].faults
        assert all(proxy.num_messages for proxy in proxies)


async def test_a_scheduler_refuses_a_router_of_a_far_version():
    worker = FakeGpuWorker(model=MODEL)
    await worker.start()
    async with (
        running_scheduler([worker]) as scheduler,
        open_channel(scheduler.address) as channel,
        asyncio.timeout(60),
    ):
        call = scheduler_pb2_grpc.SchedulerStub(channel).Connect()
        hello = scheduler_pb2.Hello(router_id="r-9", version="0.9.3")
        await call.write(scheduler_pb2.RouterMessage(hello=hello))
        with pytest.raises(Exception, match="router r-9 is Headrace") as caught:
            await call.read()
        error = from_rpc_error(caught.value)
        assert error.reason == "VERSION_SKEW"
        assert (
            f"router r-9 is Headrace 0.9.3 and this scheduler is {versions.version()}"
            in error.message
        )


async def test_a_router_does_not_use_a_scheduler_of_a_far_version(monkeypatch, caplog):
    class Later(FakeScheduler):
        async def WatchPool(self, request, context):
            async for snapshot in super().WatchPool(request, context):
                snapshot.version = "0.3.0"
                yield snapshot

    async with (
        FakeScheduler() as near,
        Later() as far,
        running_stack(schedulers=[near, far]) as stack,
    ):
        await stack.until(lambda: stack.services.schedulers[1].link().error)
        links = [client.link() for client in stack.services.schedulers]
    assert [link.connected for link in links] == [True, False]
    assert f"is Headrace 0.3.0 and this router is {versions.version()}" in links[1].error
    assert "upgrade one minor version after the other" in caplog.text


async def test_a_scheduler_does_not_use_a_worker_of_a_far_version(caplog):
    class Later(FakeGpuWorker):
        async def Describe(self, request, context):
            answer = await super().Describe(request, context)
            answer.worker.version = "1.0.0"
            return answer

    caplog.set_level("INFO")
    worker = Later(model=MODEL)
    await worker.start()
    async with asyncio.timeout(60), running_scheduler([worker]) as scheduler:
        while "the worker is Headrace 1.0.0" not in caplog.text:  # noqa: ASYNC110 a log has no event
            await asyncio.sleep(0.005)
        assert not scheduler.ready_workers()


@pytest.mark.parametrize(
    ("ours", "theirs", "is_near"),
    [
        ("0.4.0", "0.4.9", True), ("0.4.0", "0.5.0rc1", True), ("0.4.0", "0.3.7", True),
        ("0.4.0", "0.6.0", False), ("0.4.0", "0.2.9", False), ("1.4.0", "0.4.0", False),
        ("0.4.0", "", True), ("", "0.4.0", True), ("0.4.0", "what?", True),
        ("0.9.0", "0.10.1", True),
    ],
)  # fmt: skip
def test_neighbours_are_minor_versions_of_one_major_version(monkeypatch, ours, theirs, is_near):
    monkeypatch.setattr(versions, "version", lambda: ours)
    if is_near:
        versions.check_peer("it", theirs, "this")
        return
    with pytest.raises(ServiceError, match=f"it is Headrace {theirs} and this is {ours}"):
        versions.check_peer("it", theirs, "this")
