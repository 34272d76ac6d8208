"""The client against a real gRPC server with scripted answers."""

import asyncio
from contextlib import aclosing

import grpc
import pytest

from headrace.client import (
    ChannelConfig,
    ChatMessage,
    HeadraceClient,
    ResumePolicy,
    Sampling,
    ServiceError,
)
from headrace.service import telemetry
from headrace.service.serving import ServingConfig
from headrace.types import AbortResult, TokenLogprobs
from headrace.vocabulary import FinishReason
from tests.headrace import fake_inference
from tests.headrace.otlp_receiver import OtlpReceiver


@pytest.fixture
async def fake():
    servicer, server, address = await fake_inference.start()
    servicer.address = address
    servicer.server = server
    yield servicer
    await server.stop(0)


@pytest.fixture
async def client(fake):
    async with HeadraceClient(fake.address) as client:
        yield client


async def test_streams_text_with_positions_and_ends_with_reason_and_usage(client):
    deltas = [d async for d in client.generate("to be continued", request_id="r1")]
    assert [d.text for d in deltas] == ["to ", "be ", "continued", ""]
    assert [d.first_token_position for d in deltas] == [0, 1, 2, 3]
    assert {d.request_id for d in deltas} == {"r1"}
    last = deltas[-1]
    assert (last.finish_reason, last.matched_stop) == (FinishReason.STOP, "END")
    assert last.usage is not None
    assert (last.usage.completion_tokens, last.usage.cached_tokens) == (3, 3)
    assert all(d.usage is None for d in deltas[:-1])


async def test_complete_puts_the_stream_together(client):
    completion = await client.complete("to be", sampling=Sampling(logprobs=2))
    assert completion.text == "to be"
    (output,) = completion.outputs
    assert output.token_ids == (0, 1)
    assert output.finish_reason is FinishReason.STOP
    assert output.logprobs[1] == TokenLogprobs(1, -0.5, 1, ((1, -0.5), (9, -2.0)))
    assert len(completion.request_id) == 32


async def test_every_option_reaches_the_server(fake, client):
    sampling = Sampling(
        temperature=0.0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=2**63,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        logit_bias={5: -2.0},
        max_tokens=9,
        min_tokens=1,
        stop=["a", "b"],
        stop_token_ids=[7],
        bad_words=["no", " never"],
        ignore_eos=True,
        n=2,
        logprobs=0,
        prompt_logprobs=1,
    )
    await client.complete(
        "hi",
        model="fake",
        sampling=sampling,
        priority=-3,
        tenant="t",
        deadline_s=60,
        cache_salt="s",
        include_stop_str_in_output=True,
        echo=True,
        keep_special_tokens=True,
    )
    (request,) = fake.requests
    for name in Sampling.__slots__:
        sent, wanted = getattr(request.sampling, name), getattr(sampling, name)
        assert (list(sent) if isinstance(wanted, list) else sent) == wanted, name
    assert (request.priority, request.tenant, request.cache_salt) == (-3, "t", "s")
    assert request.include_stop_str_in_output
    assert request.echo
    assert request.keep_special_tokens
    assert request.HasField("deadline")


async def test_one_string_is_one_stop_and_not_its_letters(fake, client):
    await client.complete("to be", sampling=Sampling(stop="end", bad_words="never"))
    assert list(fake.requests[-1].sampling.stop) == ["end"]
    assert list(fake.requests[-1].sampling.bad_words) == ["never"]


async def test_unset_options_stay_unset(fake, client):
    await client.complete("hi")
    fake.requests[0].sampling.ClearField("seed")  # drawn, to be able to send the request again
    assert not fake.requests[0].sampling.ListFields()
    assert not fake.requests[0].HasField("deadline")


async def test_a_prompt_may_be_a_conversation(fake, client):
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "hi")]
    assert (await client.complete(messages)).text == "hi"
    sent = [(m.role, m.content) for m in fake.requests[0].chat.messages]
    assert sent == [("system", "be brief"), ("user", "hi")]


@pytest.mark.parametrize("ids", [[5, 6], []])
async def test_a_prompt_may_be_token_ids(fake, client, ids):
    with pytest.raises(ServiceError):
        await client.complete(ids)
    assert fake.requests[0].WhichOneof("prompt") == "token_ids"
    assert list(fake.requests[0].token_ids.ids) == ids


@pytest.mark.parametrize(
    ("prompt", "sampling", "field"),
    [
        ("hi", Sampling(top_k=-1), "top_k"),
        ("hi", Sampling(seed=-1), "seed"),
        ("hi", Sampling(max_tokens="x"), "max_tokens"),  # type: ignore[arg-type]
        ([-1], None, "prompt"),
        ("half a \ud83d character", None, "prompt"),
    ],
)
async def test_what_the_wire_cannot_carry_names_the_field(client, prompt, sampling, field):
    with pytest.raises(ServiceError) as refused:
        client.generate(prompt, sampling=sampling)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.field == field


async def test_errors_come_back_with_code_reason_field_and_retry(client):
    with pytest.raises(ServiceError) as refused:
        await client.complete("refuse")
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.field == "sampling.temperature"
    with pytest.raises(ServiceError) as full:
        await client.complete("full")
    assert (full.value.reason, full.value.retry_after_s) == ("QUEUE_FULL", 2.0)


async def test_a_server_that_is_not_there_is_unreachable(unused_tcp_port):
    async with HeadraceClient(f"127.0.0.1:{unused_tcp_port}") as client:
        with pytest.raises(ServiceError) as error:
            await client.complete("hi")
        assert error.value.reason == "UNREACHABLE"
        assert f"127.0.0.1:{unused_tcp_port}" in error.value.message
        with pytest.raises(ServiceError, match="cannot reach"):
            await client.models()


async def test_leaving_a_stream_early_cancels_the_request(fake, client):
    async with aclosing(client.generate("hang", request_id="r1")) as deltas:
        async for _ in deltas:
            break
    await fake.wait_for_state("r1", "ABORTED")


async def test_cancelling_the_task_cancels_the_request(fake, client):
    task = asyncio.create_task(client.complete("hang", request_id="r1"))
    await fake.wait_for_state("r1", "RUNNING")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await fake.wait_for_state("r1", "ABORTED")


async def test_an_exception_of_the_consumer_cancels_the_request(fake, client):
    async def consume():
        async with aclosing(client.generate("hang", request_id="r1")) as deltas:
            async for _ in deltas:
                raise KeyError

    with pytest.raises(KeyError):
        await consume()
    await fake.wait_for_state("r1", "ABORTED")


async def test_a_server_that_stops_midway_is_an_error_and_not_an_end(fake):
    async with HeadraceClient(fake.address, resume=ResumePolicy(timeout_s=0)) as client:
        deltas = client.generate("hang")
        await anext(deltas)
        await fake.server.stop(0)
        with pytest.raises(ServiceError):
            await anext(deltas)


async def test_abort_says_what_it_found(fake, client):
    hanging = client.generate("hang", request_id="alive")
    await anext(hanging)
    await client.complete("done", request_id="done")
    outcomes = await client.abort(["alive", "done", "who"])
    assert [o.result for o in outcomes] == [
        AbortResult.ABORTED,
        AbortResult.ALREADY_FINISHED,
        AbortResult.NOT_FOUND,
    ]
    await hanging.aclose()


async def test_abort_ends_what_is_live_of_a_tenant(fake, client):
    hanging = client.generate("hang", request_id="theirs", tenant="batch")
    await anext(hanging)
    await client.complete("done", request_id="over", tenant="batch")
    (outcome,) = await client.abort(tenant="batch")
    assert (outcome.request_id, outcome.result) == ("theirs", AbortResult.ABORTED)
    await hanging.aclose()


async def test_status_explain_models_pool_and_resume(client):
    await client.complete("hi", request_id="r1")
    record = await client.status("r1")
    assert (record.state, record.create_time_unix_s) == ("STOPPED", 1_700_000_000.5)
    explanation = await client.explain("r1")
    assert [e.kind for e in explanation.events] == ["ADDED", "WAITED"]
    assert [e.queue_position for e in explanation.events] == [None, 0]
    assert explanation.steps_waited_by_cause == {"KV_BLOCKS": 3}
    (model,) = await client.models()
    assert (model.name, model.max_model_len) == ("fake", 2048)
    pool = await client.pool()
    assert (pool.workers[0].state, pool.workers[0].role) == ("ready", "unspecified")
    assert (pool.num_queued, pool.num_in_flight, pool.num_paused) == (2, 3, 1)
    deltas = [d async for d in client.resume("r1", 1)]
    assert [(d.text, d.first_token_position) for d in deltas] == [("", 1)]


async def test_nothing_known_of_a_request_is_not_found(client):
    with pytest.raises(ServiceError) as error:
        await client.status("who")
    assert error.value.code is grpc.StatusCode.NOT_FOUND


async def test_a_token_is_sent_from_its_file(tmp_path):
    (tmp_path / "token").write_text("secret\n")
    config = ServingConfig(auth_token_file=str(tmp_path / "token"))
    _, server, address = await fake_inference.start(config)
    try:
        async with HeadraceClient(address) as client:
            with pytest.raises(ServiceError) as refused:
                await client.complete("hi")
            assert refused.value.code is grpc.StatusCode.UNAUTHENTICATED
        with_token = ChannelConfig(auth_token_file=str(tmp_path / "token"))
        async with HeadraceClient(address, with_token) as client:
            assert (await client.complete("hi")).text == "hi"
            assert await client.models()
    finally:
        await server.stop(0)


async def test_the_trace_of_the_caller_goes_with_each_call(fake, client, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    receiver = OtlpReceiver()
    exporting = telemetry.setup("client", receiver.endpoint)
    try:
        with telemetry.start_span("app") as app:
            await client.complete("hi")
            traceparent = fake.metadata[0]["traceparent"]
        exporting.shutdown()
        spans = {s.name: s for s in receiver.wait(2)}
    finally:
        exporting.shutdown()
        receiver.stop()
    call = spans["headrace.v1.Inference/Generate"]
    assert call.parent_id == spans["app"].span_id
    assert traceparent.startswith(f"00-{call.trace_id}-{call.span_id}-")
    assert call.kind == 3
    assert telemetry.traceparent_of(app).split("-")[1] == call.trace_id


async def test_without_tracing_no_trace_is_sent(fake, client):
    await client.complete("hi")
    assert "traceparent" not in fake.metadata[0]
