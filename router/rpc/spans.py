"""The span of one generation, from its arrival to the last message to its caller.

Its `traceparent` goes to the scheduler, so that what happens there hangs under it.
"""

from contextlib import AbstractContextManager
from typing import Any

from opentelemetry.trace import Span

from headrace.service import telemetry
from headrace.v1 import inference_pb2
from headrace.vocabulary import FinishReason
from router.request import ClientRequest, Detokenizing, Spec
from router.router import Router

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
    return telemetry.call_span(f"{operation} {model}", parent, attributes, context)


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
    return telemetry.call_span(
        f"resume {spec.model}", parent or spec.traceparent, attributes, context, links=links
    )


def follow(span: Span, live: ClientRequest, router: Router) -> None:
    """Measure what a request that is traced costs beside its stages."""
    if span.is_recording():
        live.detokenizing = Detokenizing(router.now)


def note_outcome(span: Span, live: ClientRequest) -> None:
    """Record a generation's output and end."""
    if not span.is_recording():
        return
    span.set_attribute(telemetry.USAGE_INPUT_TOKENS, len(live.prompt_token_ids))
    span.set_attribute(telemetry.USAGE_OUTPUT_TOKENS, live.num_completion_tokens)
    cached = max(completion.num_cached_tokens for completion in live.completions)
    span.set_attribute(telemetry.USAGE_CACHED_TOKENS, cached)
    finished = [c.finish.reason for c in live.completions if c.finish is not None]
    reasons = [reason.name.lower() for reason in finished]
    span.set_attribute(telemetry.RESPONSE_FINISH_REASONS, reasons)
    # The call itself may be well: these reach the caller in the last message.
    for reason in (FinishReason.ERROR, FinishReason.DEADLINE, FinishReason.ABORTED):
        if reason in finished:
            is_fault = reason is not FinishReason.ABORTED
            telemetry.fail(span, reason.value, f"ended as {reason.value}", is_fault=is_fault)
            break
    _record_stages(span, live)


def _record_stages(span: Span, live: ClientRequest) -> None:
    """Spans of the stages that the request has gone through here, in their order."""
    timeline = live.timeline
    to_unix_s = live.arrived_unix_s - timeline.arrived
    _record_detokenizing(span, live, to_unix_s)
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


def _record_detokenizing(span: Span, live: ClientRequest, to_unix_s: float) -> None:
    """A span of the text's making, which is a little work with each message."""
    timed = live.detokenizing
    if timed is not None and timed.num_times:
        begin, end = timed.began + to_unix_s, timed.ended + to_unix_s
        work = {"headrace.busy_s": timed.busy_s, "headrace.num_pieces": timed.num_times}
        telemetry.record_span("detokenize", span, begin, end, work)
