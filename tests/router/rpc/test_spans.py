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


async def test_a_request_has_a_span_with_model_options_and_usage(receiver, stack):
    messages = await answer(stack)
    (span,) = await asyncio.to_thread(receiver.wait, 1)
    assert span.name == f"text_completion {MODEL}"
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
    (span,) = await asyncio.to_thread(receiver.wait, 1)
    assert f"{span.trace_id}-{span.parent_id}" in CALLER
    (submission,) = stack.scheduler.submissions
    assert submission.traceparent == f"00-{span.trace_id}-{span.span_id}-01"


async def test_without_an_endpoint_the_callers_trace_goes_through(stack):
    await answer(stack, metadata=(("traceparent", CALLER),))
    assert stack.scheduler.submissions[0].traceparent == CALLER
