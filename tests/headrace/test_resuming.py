"""Streams whose connection is cut: real gRPC through a TCP proxy, scripted routers."""

import asyncio
from contextlib import AsyncExitStack, aclosing

import grpc
import pytest

from headrace import resuming
from headrace.client import HeadraceClient, ResumePolicy, Sampling, ServiceError, gather
from headrace.service import telemetry
from headrace.service.errors import (
    aborted,
    deadline_exceeded,
    exhausted,
    internal,
    invalid,
    not_found,
    unavailable,
    unimplemented,
)
from headrace.vocabulary import FinishReason
from tests.headrace import fake_inference
from tests.headrace.otlp_receiver import OtlpReceiver
from tests.headrace.tcp_proxy import TcpProxy
from tests.headrace.waiting import until

QUICK = ResumePolicy(timeout_s=60, first_backoff_s=0.01, max_backoff_s=0.05)
PROMPT = "one two gate three four"


class Cluster:
    """Two fake routers that share their requests, each behind a proxy, and a client of both."""

    def __init__(self):
        self.routers, self.proxies, self.told = [], [], []
        self.client = None

    @property
    def num_resumed(self):
        return [len(router.resumed) for router in self.routers]

    def open_gates(self):
        for router in self.routers:
            router.gate.set()


@pytest.fixture
async def cluster():
    cluster = Cluster()
    live = {}
    async with AsyncExitStack() as stack:
        for _ in range(2):
            router, server, address = await fake_inference.start(live=live)
            stack.push_async_callback(server.stop, 0)
            cluster.routers.append(router)
            cluster.proxies.append(await stack.enter_async_context(TcpProxy(address)))
        target = ",".join(proxy.address for proxy in cluster.proxies)
        cluster.client = await stack.enter_async_context(
            HeadraceClient(target, resume=QUICK, tell=cluster.told.append)
        )
        yield cluster
        for request in live.values():
            await request.abort()


async def begin(cluster, prompt=PROMPT, **options):
    """The deltas up to the gate, and the stream that waits there."""
    stream = cluster.client.generate(prompt, request_id="r1", **options)
    deltas = []
    while not deltas or deltas[-1].text != "gate ":
        deltas.append(await anext(stream))
    return deltas, stream


async def rest_of(stream):
    return [delta async for delta in stream]


async def listed(deltas):
    for delta in deltas:
        yield delta


async def test_a_cut_stream_goes_on_without_a_gap_and_says_so(cluster):
    deltas, stream = await begin(cluster)
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].cut()
    await until(lambda: sum(cluster.num_resumed) == 1)
    cluster.open_gates()
    deltas += await rest
    assert "".join(d.text for d in deltas) == PROMPT
    assert [t for d in deltas for t in d.token_ids] == [0, 1, 2, 3, 4]
    assert [d.num_resumes for d in deltas] == [0, 0, 0, 1, 1, 1]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert (await gather(listed(deltas))).num_resumes == 1
    lost, back = cluster.told
    assert lost == f"lost the connection to {cluster.proxies[0].address} (UNREACHABLE), resuming"
    assert back.startswith("resumed after ")


async def test_the_span_of_a_later_call_is_linked_to_the_first_in_its_trace(cluster, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    receiver = OtlpReceiver()
    exporting = telemetry.setup("client", receiver.endpoint)
    try:
        _, stream = await begin(cluster)
        rest = asyncio.create_task(rest_of(stream))
        await cluster.proxies[0].cut()
        await until(lambda: sum(cluster.num_resumed) == 1)
        cluster.open_gates()
        await rest
        await asyncio.to_thread(exporting.shutdown)
        first, *later = sorted(receiver.wait(2), key=lambda span: span.begin_unix_ns)
    finally:
        exporting.shutdown()
        receiver.stop()
    assert (first.name, first.status, first.attributes["error.type"]) == (
        "headrace.v1.Inference/Generate",
        2,
        "UNREACHABLE",
    )
    # Perhaps a call or two did not get through before the one that did.
    assert later[-1].name == "headrace.v1.Inference/Resume"
    assert later[-1].status == 0
    for span in later:
        assert (span.trace_id, span.links) == (first.trace_id, (first.span_id,))


async def test_the_next_router_is_asked_for_the_next_token(cluster):
    _, stream = await begin(cluster)
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].refuse()
    await until(lambda: cluster.num_resumed == [0, 1])
    assert cluster.routers[1].resumed[0].from_token_by_index == [3]
    cluster.open_gates()
    await rest


async def test_a_router_that_is_gone_for_a_while_is_waited_for(cluster):
    one = HeadraceClient(cluster.proxies[0].address, resume=QUICK)
    cluster.client, both = one, cluster.client
    deltas, stream = await begin(cluster)
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].refuse()
    cluster.open_gates()
    await cluster.proxies[0].listen()
    deltas += await rest
    assert "".join(d.text for d in deltas) == PROMPT
    await one.aclose()
    cluster.client = both


async def test_a_stream_is_cut_again_and_again_and_counts_it(cluster):
    prompt = " ".join(f"{i}" for i in range(30))
    stream = cluster.client.generate(prompt, request_id="r1")
    deltas = []
    async for delta in stream:
        deltas.append(delta)
        if len(deltas) in {3, 9, 20}:
            for proxy in cluster.proxies:
                await proxy.cut()
    assert "".join(d.text for d in deltas) == prompt
    assert [t for d in deltas for t in d.token_ids] == list(range(30))


async def test_each_of_several_completions_goes_on_at_its_own_token(cluster):
    deltas, stream = await begin(cluster, sampling=Sampling(n=2))
    assert [d.index for d in deltas] == [0, 1, 0, 1, 0]
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].cut()
    await until(lambda: sum(cluster.num_resumed) == 1)
    (resumed,) = cluster.routers[0].resumed + cluster.routers[1].resumed
    assert list(resumed.from_token_by_index) == [3, 2]
    cluster.open_gates()
    completion = await gather(listed(deltas + await rest))
    assert [o.text for o in completion.outputs] == [PROMPT, PROMPT]
    assert [o.token_ids for o in completion.outputs] == [(0, 1, 2, 3, 4)] * 2


async def test_a_completion_that_has_not_begun_is_resumed_from_where_it_was_to_begin(cluster):
    _, stream = await begin(cluster, sampling=Sampling(n=2))
    again = cluster.client.resume("r1", from_token=1)
    deltas = [await anext(again)]
    assert (deltas[0].index, deltas[0].token_ids) == (0, (1,))
    rest = asyncio.create_task(rest_of(again))
    await cluster.proxies[0].cut()
    await until(lambda: sum(cluster.num_resumed) >= 2)
    cluster.open_gates()
    completion = await gather(listed(deltas + await rest))
    assert [o.token_ids for o in completion.outputs] == [(1, 2, 3, 4)] * 2
    await stream.aclose()


async def test_an_echo_before_the_first_token_comes_once(cluster):
    stream = cluster.client.generate("gate on", request_id="r1", echo=True)
    first = await anext(stream)
    assert (first.text, first.token_ids) == ("> ", ())
    for proxy in cluster.proxies:
        await proxy.cut()
    cluster.open_gates()
    rest = await rest_of(stream)
    assert first.text + "".join(d.text for d in rest) == "> gate on"


async def test_without_any_answer_the_request_is_sent_again(cluster):
    cluster.routers[0].errors.append(unavailable("DRAINING", "shutting down", 30.0))
    completion = await cluster.client.complete("to be", request_id="r1")
    assert (completion.text, completion.num_resumes) == ("to be", 1)
    assert [r.request_id for r in cluster.routers[1].requests] == ["r1"]
    assert cluster.num_resumed == [0, 0]


async def test_an_address_where_nobody_is_costs_no_wait_and_no_word(cluster, unused_tcp_port):
    target = f"127.0.0.1:{unused_tcp_port}, {cluster.proxies[0].address}"
    async with HeadraceClient(target, tell=cluster.told.append) as client:
        assert (await client.complete("to be")).num_resumes == 0
        assert [m.name for m in await client.models()] == ["fake"]
    assert not cluster.told


async def test_other_calls_find_the_router_that_is_there(cluster, unused_tcp_port):
    async with HeadraceClient(f"127.0.0.1:{unused_tcp_port},{cluster.proxies[1].address}") as c:
        assert [m.name for m in await c.models()] == ["fake"]


@pytest.mark.parametrize(
    "error",
    [
        invalid("text", "too long"),
        exhausted("QUEUE_FULL", "full", 0.01),
        unavailable("NO_READY_WORKER", "none", 0.01),
        unavailable("WORKER_LOST", "lost", 0.01),
        aborted("RESUMED_ELSEWHERE", "another caller reads it"),
        deadline_exceeded("DEADLINE", "late"),
        internal("GENERATION_FAILED", "broken"),
        internal("INTERNAL", "a bug"),
        ServiceError(grpc.StatusCode.UNAUTHENTICATED, "BAD_TOKEN", "which?"),
        ServiceError(grpc.StatusCode.PERMISSION_DENIED, "DENIED", "no"),
        ServiceError(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST_ID", "used"),
    ],
    ids=lambda error: error.reason,
)
async def test_what_a_router_answers_is_not_tried_again(cluster, error):
    for router in cluster.routers:
        router.errors.append(error)
    with pytest.raises(ServiceError) as refused:
        await cluster.client.complete("to be")
    assert (refused.value.reason, refused.value.message) == (error.reason, error.message)
    assert sum(len(router.requests) for router in cluster.routers) == 1
    assert not cluster.told


@pytest.mark.parametrize(
    "error",
    [
        unavailable("STORE_UNAVAILABLE", "wait"),
        unavailable("NO_READY_WORKER", "starting", 0.01),
        unavailable("DRAINING", "shutting down", 0.01),
        exhausted("TOO_MANY_LIVE", "full", 0.01),
        not_found("UNKNOWN_REQUEST", "who"),
        ServiceError(grpc.StatusCode.DATA_LOSS, "TOKENS_LOST", "the last tokens are on their way"),
    ],
    ids=lambda error: error.reason,
)
async def test_what_passes_is_waited_for_when_resuming(cluster, error):
    deltas, stream = await begin(cluster)
    for router in cluster.routers:
        router.errors.append(error)
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].cut()
    await until(lambda: sum(cluster.num_resumed) == 3)
    cluster.open_gates()
    deltas += await rest
    assert "".join(d.text for d in deltas) == PROMPT
    assert deltas[-1].num_resumes == 1


@pytest.mark.parametrize(
    "error",
    [
        unimplemented("NO_RESUME", "this version does not"),
        aborted("ABORTED", "the request was ended by Abort"),
        internal("GENERATION_FAILED", "broken"),
        not_found("NOT_KEPT", "too large"),
        ServiceError(grpc.StatusCode.DATA_LOSS, "CORRUPT_RECORD", "unreadable"),
    ],
    ids=lambda error: error.reason,
)
async def test_what_does_not_pass_ends_the_stream_with_what_was_lost(cluster, error):
    _, stream = await begin(cluster)
    for router in cluster.routers:
        router.errors.append(error)
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].cut()
    with pytest.raises(ServiceError) as failed:
        await rest
    assert (failed.value.code, failed.value.reason) == (error.code, error.reason)
    assert failed.value.message == (
        f"the connection was lost after 3 tokens, and the request did not go on: {error.message}"
    )
    assert sum(cluster.num_resumed) == 1


@pytest.mark.parametrize("n", [1, 3])
async def test_a_request_that_no_router_knows_any_more_is_sent_again(cluster, monkeypatch, n):
    monkeypatch.setattr(resuming, "_UNKNOWN_FOR_S", 0.1)
    deltas, stream = await begin(cluster, sampling=Sampling(n=n))
    cluster.routers[0].live.clear()
    for router in cluster.routers:
        router.gate.set()
    await cluster.proxies[0].cut()
    deltas += await rest_of(stream)
    assert all(cluster.num_resumed), "all were asked"
    for output in (await gather(listed(deltas))).outputs:
        assert output.text == PROMPT
    first, again = (r for router in cluster.routers for r in router.requests)
    assert first.sampling.seed == again.sampling.seed
    assert list(again.from_token_by_index) == [3] + [2] * (n - 1)


async def test_a_request_that_is_only_read_and_not_known_any_more_is_an_error(cluster, monkeypatch):
    monkeypatch.setattr(resuming, "_UNKNOWN_FOR_S", 0.1)
    _, stream = await begin(cluster)
    reading = cluster.client.resume("r1", 0)
    await anext(reading)
    cluster.routers[0].live.clear()
    await cluster.proxies[0].cut()
    with pytest.raises(ServiceError, match=r"after [123] tokens") as failed:
        await rest_of(reading)
    assert failed.value.reason == "UNKNOWN_REQUEST"
    await stream.aclose()


async def test_a_stream_is_given_up_in_the_end(cluster):
    policy = ResumePolicy(timeout_s=0.2, first_backoff_s=0.01, max_backoff_s=0.02)
    async with HeadraceClient(cluster.proxies[0].address, resume=policy) as client:
        stream = client.generate("hang", request_id="r2")
        await anext(stream)
        await cluster.proxies[0].refuse()
        with pytest.raises(ServiceError, match="after 1 tokens") as failed:
            await anext(stream)
    assert failed.value.reason == "UNREACHABLE"


@pytest.mark.parametrize("shift", [-1, 1])
async def test_tokens_that_repeat_or_are_missing_are_an_error(cluster, shift):
    _, stream = await begin(cluster)
    for router in cluster.routers:
        router.resume_shift = shift
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].cut()
    await until(lambda: sum(cluster.num_resumed) == 1)
    cluster.open_gates()
    with pytest.raises(ServiceError) as failed:
        await rest
    assert (failed.value.code, failed.value.reason) == (
        grpc.StatusCode.DATA_LOSS,
        "STREAM_BROKEN",
    )


async def test_leaving_early_aborts_a_request_that_a_lost_connection_would_not(cluster):
    async with aclosing(cluster.client.generate("hang", request_id="r1")) as deltas:
        await anext(deltas)
    await cluster.routers[0].wait_for_state("r1", "ABORTED")
    assert cluster.routers[0].requests[0].keep_on_disconnect
    assert cluster.routers[0].aborted == ["r1"]


async def test_a_first_token_may_come_later_than_a_connection(cluster, monkeypatch):
    await cluster.client.models()
    monkeypatch.setattr("headrace.connections._CONNECT_TIMEOUT_S", 0.05)
    deltas = cluster.client.generate("late", request_id="r1")
    first = asyncio.ensure_future(anext(deltas))
    await cluster.routers[0].wait_for_state("r1", "RUNNING")
    done, _ = await asyncio.wait({first}, timeout=0.2)
    assert not done
    cluster.routers[0].gate.set()
    assert (await first).token_ids
    await deltas.aclose()


async def test_leaving_at_the_end_aborts_nothing(cluster):
    async with aclosing(cluster.client.generate("to be", request_id="r1")) as deltas:
        async for delta in deltas:
            if delta.finish_reason is not None:
                break
    assert not cluster.routers[0].aborted


async def test_closing_the_client_ends_its_requests_and_their_streams(cluster):
    client = HeadraceClient(cluster.proxies[0].address, resume=QUICK)
    left = client.generate("hang", request_id="left")
    read = client.generate("hang", request_id="read")
    for stream in (left, read):
        await anext(stream)
    reading = asyncio.create_task(rest_of(read))
    await client.aclose()
    with pytest.raises(ServiceError):
        await reading
    await left.aclose()
    assert sorted(cluster.routers[0].aborted) == ["left", "read"]
    with pytest.raises(ServiceError, match="closed"):
        await client.models()
    with pytest.raises(ServiceError, match="closed"):
        await anext(client.generate("to be"))


async def test_leaving_while_the_connection_is_lost_aborts_on_the_other_router(cluster):
    _, stream = await begin(cluster)
    for router in cluster.routers:
        router.errors += [unavailable("STORE_UNAVAILABLE", "wait")] * 1000
    rest = asyncio.create_task(rest_of(stream))
    await cluster.proxies[0].refuse()
    await until(lambda: cluster.num_resumed[1] >= 1)
    rest.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rest
    assert cluster.routers[1].aborted == ["r1"]


async def test_a_request_that_is_to_be_kept_goes_on_when_its_consumer_leaves(cluster):
    stream = cluster.client.generate(PROMPT, request_id="r1", keep_on_disconnect=True)
    async with aclosing(stream) as deltas:
        await anext(deltas)
    cluster.open_gates()
    rest = await gather(cluster.client.resume("r1", from_token=1))
    assert rest.text == "two gate three four"
    assert not cluster.routers[0].aborted


async def test_without_resuming_the_end_of_the_call_is_the_end_of_the_request(cluster):
    async with HeadraceClient(
        cluster.proxies[0].address, resume=ResumePolicy(timeout_s=0)
    ) as client:
        async with aclosing(client.generate("hang", request_id="r1")) as deltas:
            await anext(deltas)
        assert not cluster.routers[0].requests[0].keep_on_disconnect
        await cluster.routers[0].wait_for_state("r1", "ABORTED")
    assert not cluster.routers[0].aborted


async def test_reading_a_request_of_somebody_else_does_not_end_it(cluster):
    _, stream = await begin(cluster)
    async with aclosing(cluster.client.resume("r1")) as deltas:
        await anext(deltas)
    assert not cluster.routers[0].aborted
    await stream.aclose()
