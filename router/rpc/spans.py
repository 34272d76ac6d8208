"""The span of a Generate call, named and attributed as OpenTelemetry's GenAI conventions say."""

from contextlib import AbstractContextManager
from typing import Any

from opentelemetry.trace import Span, SpanKind

from headrace.service import telemetry
from headrace.v1 import inference_pb2
from router.request import Request
from router.stream import Usage


def generate_span(
    request: inference_pb2.GenerateRequest, model: str, context: Any
) -> AbstractContextManager[Span]:
    """A span around the answering of a request; a trace begins here if the caller has none."""
    operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
    attributes: dict[str, str | int | float | bool] = {
        telemetry.OPERATION_NAME: operation,
        telemetry.PROVIDER_NAME: "headrace",
        telemetry.REQUEST_MODEL: model,
        telemetry.RESPONSE_MODEL: model,
    }
    sampling = request.sampling
    if sampling.HasField("max_tokens"):
        attributes[telemetry.REQUEST_MAX_TOKENS] = sampling.max_tokens
    if sampling.HasField("temperature"):
        attributes[telemetry.REQUEST_TEMPERATURE] = sampling.temperature
    if sampling.HasField("top_p"):
        attributes[telemetry.REQUEST_TOP_P] = sampling.top_p
    # Without an endpoint of ours, the caller's trace still goes on to the scheduler.
    parent = telemetry.current_traceparent() or telemetry.incoming_traceparent(context)
    return telemetry.start_span(f"{operation} {model}", parent, attributes, kind=SpanKind.SERVER)


def note_answer(span: Span, live: Request, usage: Usage) -> None:
    """What is known when the last message goes out."""
    if not span.is_recording():
        return
    reasons = [c.finish.reason.name.lower() for c in live.completions if c.finish is not None]
    span.set_attributes(
        {
            telemetry.RESPONSE_ID: live.spec.request_id,
            telemetry.RESPONSE_FINISH_REASONS: reasons,
            telemetry.USAGE_INPUT_TOKENS: usage.prompt_tokens,
            telemetry.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
            telemetry.USAGE_CACHED_TOKENS: usage.cached_tokens,
        }
    )
