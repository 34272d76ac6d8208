"""The span of a Generate call, over the real OTLP wire."""

import asyncio
import contextlib

import grpc.aio
import pytest

from headrace.service import telemetry
from headrace.v1 import common_pb2, inference_pb2
from tests.headrace.otlp_receiver import OtlpReceiver
from tests.router.fake_scheduler import MODEL

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def receiver(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    receiver = OtlpReceiver()
    traces = telemetry.setup("router", receiver.endpoint)
    yield receiver
    traces.shutdown()
    receiver.stop()


async def answer(stack, metadata=()):
    sampling = common_pb2.SamplingParams(max_tokens=3, temperature=0.5)
    request = inference_pb2.GenerateRequest(request_id="r-1", text="hello", sampling=sampling)
    return [message async for message in stack.stub.Generate(request, metadata=metadata)]


async def generation(receiver):
    """The span of the only request; the other spans are its stages."""
    spans = await asyncio.to_thread(receiver.wait, 7)
    (root,) = [span for span in spans if span.name == f"text_completion {MODEL}"]
    by_name = {span.name: span for span in spans if span is not root}
    assert sorted(by_name) == ["admission", "decode", "detokenize", "prefill", "queue", "tokenize"]
    assert by_name.pop("tokenize").parent_id == by_name["admission"].span_id
    assert {span.parent_id for span in by_name.values()} == {root.span_id}
    assert {span.trace_id for span in spans} == {root.trace_id}
    return root


async def test_a_request_has_a_span_with_model_options_and_usage(receiver, stack):
    messages = await answer(stack)
    span = await generation(receiver)
    assert not span.parent_id
    attributes = span.attributes
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.request.model"] == MODEL
    assert attributes["gen_ai.request.max_tokens"] == 3
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert "gen_ai.request.top_p" not in attributes
    assert attributes["gen_ai.response.id"] == "r-1"
    usage = messages[-1].usage
    assert attributes["gen_ai.usage.input_tokens"] == usage.prompt_tokens
    assert attributes["gen_ai.usage.output_tokens"] == 3


async def test_the_scheduler_is_told_the_span_as_its_parent(receiver, stack):
    await answer(stack, metadata=(("traceparent", CALLER),))
    span = await generation(receiver)
    assert f"{span.trace_id}-{span.parent_id}" in CALLER
    (submission,) = stack.scheduler.submissions
    assert submission.traceparent == f"00-{span.trace_id}-{span.span_id}-01"


async def test_without_an_endpoint_the_callers_trace_goes_through(stack):
    await answer(stack, metadata=(("traceparent", CALLER),))
    assert stack.scheduler.submissions[0].traceparent == CALLER


async def test_the_stages_of_a_request_follow_each_other(receiver, stack):
    await answer(stack)
    root = await generation(receiver)
    by_name = {span.name: span for span in receiver.spans}
    ends = [by_name[name] for name in ("tokenize", "queue", "prefill", "decode")]
    times = [time for span in ends for time in (span.begin_unix_ns, span.end_unix_ns)]
    # Queue, prefill and decode are on one clock, and touch.
    assert times[3] == times[4]
    assert times[5] == times[6]
    assert times[2:] == sorted(times[2:])
    assert root.end_unix_ns >= times[1] >= times[0] >= root.begin_unix_ns
    text = by_name["detokenize"]
    assert 1 <= text.attributes["headrace.num_pieces"] <= 3
    assert 0 < text.attributes["headrace.busy_s"] <= (text.end_unix_ns - text.begin_unix_ns) / 1e9


async def test_an_unsampled_request_makes_no_span_and_its_trace_goes_on(receiver, stack):
    unsampled = CALLER.replace("0af", "0cf").removesuffix("1") + "0"
    await answer(stack, metadata=(("traceparent", unsampled),))
    assert stack.scheduler.submissions[0].traceparent == unsampled
    await answer(stack, metadata=(("traceparent", CALLER),))
    await generation(receiver)
    assert {span.trace_id for span in receiver.spans} == {CALLER.split("-")[1]}


async def ended_span(receiver, stack, call):
    """The request's span once a call has ended by itself or by its caller."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while await call.read() is not grpc.aio.EOF:
            pass
    named = f"text_completion {MODEL}"
    await stack.until(lambda: any(span.name == named for span in receiver.spans))
    return next(span for span in receiver.spans if span.name == named)


async def test_a_callers_mistake_is_no_error_of_the_router(receiver, stack):
    span = await ended_span(receiver, stack, stack.generate(sampling={"max_tokens": 10**6}))
    attributes = span.attributes
    assert attributes["rpc.response.status_code"] == "INVALID_ARGUMENT"
    assert (attributes["error.type"], span.status) == ("INVALID_FIELD", 0)


async def test_a_call_whose_time_is_up_and_one_that_is_cancelled_differ(receiver, stack):
    stack.scheduler.limit = 2
    late = await ended_span(receiver, stack, stack.generate(timeout=0.3))
    assert late.attributes["rpc.response.status_code"] == "DEADLINE_EXCEEDED"
    assert late.status == 2
    receiver.spans.clear()
    call = stack.generate()
    await call.read()
    call.cancel()
    given_up = await ended_span(receiver, stack, call)
    assert (given_up.attributes["error.type"], given_up.status) == ("CANCELLED", 0)


async def test_a_later_call_in_a_trace_of_its_own_is_linked_to_the_first(receiver, stack):
    sampling = common_pb2.SamplingParams(max_tokens=3)
    request = inference_pb2.GenerateRequest(
        request_id="r-1", text="hello", sampling=sampling, keep_on_disconnect=True
    )
    stack.scheduler.limit = 2
    first = stack.stub.Generate(request, metadata=(("traceparent", CALLER.replace("0af", "0bf")),))
    await first.read()
    again = stack.stub.Generate(request, metadata=(("traceparent", CALLER),))
    await again.read()
    for call in (first, again):
        call.cancel()
    await stack.until(lambda: any(span.name == f"resume {MODEL}" for span in receiver.spans))
    await stack.until(lambda: any("completion" in span.name for span in receiver.spans))
    (resumed,) = [span for span in receiver.spans if span.name == f"resume {MODEL}"]
    (begun,) = [span for span in receiver.spans if span.name == f"text_completion {MODEL}"]
    assert resumed.trace_id in CALLER
    assert resumed.links == (begun.span_id,)
    await stack.until(lambda: stack.router.live.dispatcher.num_in_flight == 1)
    stack.router.abort_all()
