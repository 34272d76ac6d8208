"""The span of one generation, from its arrival to the last message to its caller.

Its `traceparent` goes to the scheduler, so that what happens there hangs under it.
"""

from contextlib import AbstractContextManager
from typing import Any

from opentelemetry.trace import Span, SpanKind

from headrace.service import telemetry
from headrace.v1 import inference_pb2
from router.request import ClientRequest, Spec

_PROVIDER = "headrace"


def generation(
    request: inference_pb2.GenerateRequest, request_id: str, model: str, context: Any
) -> AbstractContextManager[Span]:
    """A span for the block that answers the request; costs nothing when nothing is exported."""
    operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
    # Inside the server's own span where there is one, else under the caller's trace context.
    parent = telemetry.current_traceparent() or telemetry.incoming_traceparent(context) or ""
    attributes: dict[str, str | int | float | bool] = {
        telemetry.OPERATION_NAME: operation,
        telemetry.PROVIDER_NAME: _PROVIDER,
        telemetry.REQUEST_MODEL: model,
        telemetry.RESPONSE_MODEL: model,
        telemetry.RESPONSE_ID: request_id,
    }
    sampling = request.sampling
    if sampling.HasField("max_tokens"):
        attributes[telemetry.REQUEST_MAX_TOKENS] = sampling.max_tokens
    if sampling.HasField("temperature"):
        attributes[telemetry.REQUEST_TEMPERATURE] = sampling.temperature
    if sampling.HasField("top_p"):
        attributes[telemetry.REQUEST_TOP_P] = sampling.top_p
    return telemetry.start_span(f"{operation} {model}", parent, attributes, kind=SpanKind.SERVER)


def resumption(spec: Spec, context: Any) -> AbstractContextManager[Span]:
    """A span for the block that answers a call for an earlier request."""
    parent = telemetry.current_traceparent() or telemetry.incoming_traceparent(context) or ""
    attributes: dict[str, str | int | float | bool] = {
        telemetry.OPERATION_NAME: "resume",
        telemetry.PROVIDER_NAME: _PROVIDER,
        telemetry.REQUEST_MODEL: spec.model,
        telemetry.RESPONSE_MODEL: spec.model,
        telemetry.RESPONSE_ID: spec.request_id,
    }
    # In a trace of its own, the later call is linked to the first.
    links = [spec.traceparent] if parent else []
    return telemetry.start_span(
        f"resume {spec.model}",
        parent or spec.traceparent,
        attributes,
        kind=SpanKind.SERVER,
        links=links,
    )


def note_outcome(span: Span, live: ClientRequest) -> None:
    """Record a generation's output and end."""
    if not span.is_recording():
        return
    span.set_attribute(telemetry.USAGE_INPUT_TOKENS, len(live.prompt_token_ids))
    span.set_attribute(telemetry.USAGE_OUTPUT_TOKENS, live.num_completion_tokens)
    cached = max(completion.num_cached_tokens for completion in live.completions)
    span.set_attribute(telemetry.USAGE_CACHED_TOKENS, cached)
    reasons = [c.finish.reason.name.lower() for c in live.completions if c.finish is not None]
    span.set_attribute(telemetry.RESPONSE_FINISH_REASONS, reasons)
    _record_stages(span, live)


def _record_stages(span: Span, live: ClientRequest) -> None:
    """Spans of the stages that the request has gone through here, in their order."""
    timeline = live.timeline
    to_unix_s = live.arrived_unix_s - timeline.arrived
    begin = timeline.queued
    for name, end in (
        ("queue", timeline.admitted),
        ("prefill", timeline.first_token),
        ("decode", timeline.ended),
    ):
        if end is None:
            return
        telemetry.record_span(name, span, begin + to_unix_s, max(begin, end) + to_unix_s)
        begin = max(begin, end)
