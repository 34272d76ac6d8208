"""The span of a Generate call, over the real OTLP wire."""

import asyncio

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
    spans = await asyncio.to_thread(receiver.wait, 5)
    (root,) = [span for span in spans if span.name == f"text_completion {MODEL}"]
    stages = [span for span in spans if span is not root]
    assert sorted(span.name for span in stages) == ["decode", "prefill", "queue", "tokenize"]
    assert {span.parent_id for span in stages} == {root.span_id}
    assert {span.trace_id for span in stages} == {root.trace_id}
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
