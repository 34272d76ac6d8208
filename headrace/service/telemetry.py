"""Traces: one trace id from the client's call to the worker's step, exported over OTLP/gRPC.

Trace context travels as a W3C `traceparent` string, because most hops are not calls but fields of
messages on long streams. Without an endpoint the SDK is not even imported, and a span
costs one comparison; a caller's context is still passed on. Where a trace begins it is decided
whether the trace is sampled; below a span that is not, nothing is made.

Attribute names follow OpenTelemetry's semantic conventions for RPC and for generative AI.
"""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.status import Status, StatusCode

from headrace.service.config import ConfigError
from headrace.service.errors import ServiceError
from headrace.service.handlers import Behaviour, surround

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]

# Attribute names that more than one service sets.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_TEMPERATURE = "gen_ai.request.temperature"
REQUEST_TOP_P = "gen_ai.request.top_p"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE = "error.type"
RPC_SYSTEM = "rpc.system.name"
RPC_METHOD = "rpc.method"
RPC_STATUS_CODE = "rpc.response.status_code"

# A collector that hangs must not delay the end of a service for longer than this.
EXPORT_TIMEOUT_S = 2.0
_FLUSH_TIMEOUT_MS = 2_000
# News of the caller's timer may come before the same timer here runs out.
_DEADLINE_MARGIN_S = 0.05

_PROPAGATOR = TraceContextTextMapPropagator()

# Not OpenTelemetry's context: an async generator that is dropped half-way is finished in another
# context, where detaching would log an error for each cancelled stream.
_current: ContextVar[Span | None] = ContextVar("headrace_span", default=None)
_tracer: trace.Tracer | None = None

# Status codes of faults of the server, as opposed to faults of the caller.
_SERVER_FAULTS = frozenset(
    {
        "UNKNOWN",
        "DEADLINE_EXCEEDED",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
    }
)


@dataclass(frozen=True, slots=True)
class Telemetry:
    """The exporter that `setup` started; owned by the process's main function.

    server_interceptors go outermost (first) in a server's list, so that they see the status that
    inner ones decide. Empty when nothing is exported.
    """

    provider: "TracerProvider | None" = None
    server_interceptors: Sequence[grpc.aio.ServerInterceptor] = field(default=())

    def shutdown(self) -> None:
        """Exports the remaining spans, which takes at most seconds. Blocks; call this last."""
        global _tracer  # noqa: PLW0603
        if self.provider is None:
            return
        _tracer = None
        self.provider.force_flush(_FLUSH_TIMEOUT_MS)
        self.provider.shutdown()


def setup(service_name: str, endpoint: str | None = None) -> Telemetry:
    """Starts exporting spans of this process, or nothing when there is no endpoint.

    Args:
        service_name: `service.name` of every span; OTEL_SERVICE_NAME wins.
        endpoint: `http://host:port` (plain) or `https://host:port` (TLS) of an OTLP/gRPC
            receiver. None or "": OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, else
            OTEL_EXPORTER_OTLP_ENDPOINT, else off.

    Raises:
        ConfigError: the endpoint has another form.
    """
    global _tracer  # noqa: PLW0603
    endpoint = endpoint_for("TRACES", endpoint)
    if not endpoint:
        return Telemetry()

    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased

    provider = TracerProvider(resource=resource_of(service_name), shutdown_on_exit=False)
    # OTEL_TRACES_SAMPLER may name a sampler that would cut a caller's trace into pieces.
    provider.sampler = ParentBased(provider.sampler)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("headrace")
    return Telemetry(provider, [ServerSpans()])


def endpoint_for(signal: Literal["TRACES", "METRICS"], endpoint: str | None) -> str:
    """Where a signal is sent: the endpoint if given, else OpenTelemetry's variables; "" is off.

    Raises:
        ConfigError: the endpoint has another form than `setup` says.
    """
    environ = os.environ
    endpoint = (
        endpoint
        or environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    )
    if not endpoint or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return ""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"OTLP endpoint {endpoint!r} must begin with http:// or https://")
    return endpoint


def resource_of(service_name: str) -> "Resource":
    """What this process is, on all that it sends; OTEL_SERVICE_NAME wins."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service_name)})


def begin_span(
    name: str,
    parent: str | Span | None = None,
    attributes: Attributes | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[str | Span] = (),
) -> Span:
    """Starts a span that is not made current; the caller ends it. For work with no single task.

    Args:
        name: the kind of work, of few distinct values.
        parent: a span of this process, or a traceparent from another process or request. None: the
            current span of this task, or the start of a trace. "" or malformed: the start of one.
        attributes: those known now.
        kind: OpenTelemetry's kind of span.
        links: other requests that this work also serves, as parent.
    """
    above = current_span().get_span_context() if parent is None else _context_of(parent)
    if _tracer is None or (above.is_valid and not above.trace_flags.sampled):
        # Not the parent itself, which may be a span of the application: the caller ends this one.
        return trace.NonRecordingSpan(above)
    context = trace.set_span_in_context(trace.NonRecordingSpan(above), Context())
    linked = [Link(found) for other in links if (found := _context_of(other)).is_valid]
    return _tracer.start_span(name, context, kind, dict(attributes or {}), links=linked)


def _context_of(span: str | Span) -> trace.SpanContext:
    if isinstance(span, Span):
        return span.get_span_context()
    parsed = parse_traceparent(span)
    return trace.INVALID_SPAN_CONTEXT if parsed is None else parsed.get_span_context()


def record_span(
    name: str,
    parent: Span,
    begin_unix_s: float,
    end_unix_s: float,
    attributes: Attributes | None = None,
) -> None:
    """Records a span of work that is over, under another span that is recorded."""
    if _tracer is not None and parent.is_recording():
        context = trace.set_span_in_context(parent)
        begin_unix_ns = int(begin_unix_s * 1e9)
        span = _tracer.start_span(
            name, context, attributes=dict(attributes or {}), start_time=begin_unix_ns
        )
        span.end(int(end_unix_s * 1e9))


def start_span(
    name: str,
    parent: str | Span | None = None,
    attributes: Attributes | None = None,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[str | Span] = (),
) -> contextlib.AbstractContextManager[Span]:
    """A span that begins now, current inside the block; arguments as `begin_span`.

    An exception marks the span as failed and goes on; cancellation is noted, not a fault.
    """
    span = begin_span(name, parent, attributes, kind=kind, links=links)
    return use_span(span, notes_errors=True)


@contextlib.contextmanager
def use_span(span: Span, *, notes_errors: bool = False) -> Iterator[Span]:
    """Makes a span current inside the block and ends it there."""
    token = _current.set(span)
    try:
        yield span
    except BaseException as error:
        if notes_errors:
            note_error(span, error)
        raise
    finally:
        # A generator closed by the garbage collector is in another context.
        with contextlib.suppress(ValueError):
            _current.reset(token)
        span.end()


def note_error(span: Span, error: BaseException) -> None:
    """Records on a span why its work ended early; the caller still ends the span.

    A refusal of what a caller asked for is no error of a server's span, and one of a client's.
    """
    if not span.is_recording():
        return
    if isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute(ERROR_TYPE, "cancelled")
        return
    if isinstance(error, ServiceError):
        span.set_attribute(RPC_STATUS_CODE, error.code.name)
        fail(span, error.reason, error.message, is_fault=_is_fault(span, error.code.name))
    else:
        fail(span, type(error).__qualname__, str(error))


def fail(span: Span, error_type: str, message: str, *, is_fault: bool = True) -> None:
    """Records that work failed; is_fault: not because of what the caller asked for or did."""
    span.set_attribute(ERROR_TYPE, error_type)
    if is_fault:
        span.set_status(Status(StatusCode.ERROR, message))


def _is_fault(span: Span, code: str) -> bool:
    return code in _SERVER_FAULTS or getattr(span, "kind", None) is SpanKind.CLIENT


def current_span() -> Span:
    """The current span, to set attributes on; an untraced span ignores attributes."""
    return _current.get() or trace.get_current_span()


def current_traceparent() -> str:
    """The W3C `traceparent` of the current span for the next process; "" when not traced.

    Outside spans of this module the current span is that of the application's OpenTelemetry.
    """
    return traceparent_of(current_span())


def traceparent_of(span: Span) -> str:
    """The W3C `traceparent` of a span; "" when the span is not traced."""
    if not span.get_span_context().is_valid:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier["traceparent"]


def parse_traceparent(traceparent: str) -> Span | None:
    """A caller's span, to be a parent; None when the string is empty or not W3C's form."""
    if not traceparent:
        return None
    span = trace.get_current_span(_PROPAGATOR.extract({"traceparent": traceparent}, Context()))
    return span if span.get_span_context().is_valid else None


def outgoing_metadata(span: Span | None = None) -> tuple[tuple[str, str], ...]:
    """Call metadata that carries a span's trace (None: the current one); empty when untraced."""
    traceparent = current_traceparent() if span is None else traceparent_of(span)
    return (("traceparent", traceparent),) if traceparent else ()


def is_sampled(traceparent: str) -> bool:
    """Whether the caller exports the trace, so that its spans are to be made here, too."""
    # In every version of the form the flags are the two digits after 53 characters.
    if len(traceparent) < 55 or traceparent[54] not in "13579bdf":
        return False
    return parse_traceparent(traceparent) is not None


def link(span: Span, other: Span) -> None:
    """Link a span to another one, perhaps of another trace."""
    if span.is_recording():
        span.add_link(other.get_span_context())


def incoming_traceparent(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """The `traceparent` in a call's metadata; None when the caller sent none."""
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return value if isinstance(value, str) else None
    return None


class ServerSpans(grpc.aio.ServerInterceptor):
    """A SERVER span around each call, ended with the status the caller gets, cancelled ones too.

    A call without a caller's trace gets none: most are polls, or streams that last as long as the
    services at both ends. A service opens the span itself where a trace shall begin.
    """

    async def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        traceparent = metadata.get("traceparent", "")
        if handler is None or not traceparent:
            return handler

        async def traced(behaviour: Behaviour, messages: Any, context: Any) -> Any:
            method = handler_call_details.method.removeprefix("/")
            attributes = {RPC_SYSTEM: "grpc", RPC_METHOD: method}
            with call_span(method, str(traceparent), attributes, context):
                return await behaviour(messages, context)

        return surround(handler, traced)


@contextlib.contextmanager
def call_span(
    name: str,
    traceparent: str,
    attributes: Attributes,
    context: Any,
    *,
    links: Sequence[str] = (),
) -> Iterator[Span]:
    """A SERVER span around the answer to a call, with the status that the caller gets."""
    span = begin_span(name, traceparent, attributes, kind=SpanKind.SERVER, links=links)
    with use_span(span):
        if not span.is_recording():
            yield span
            return
        code, reason = "UNKNOWN", ""
        try:
            yield span
            code = _code_name(context.code())
        except ServiceError as error:
            code, reason = error.code.name, error.reason
            raise
        except asyncio.CancelledError:
            # gRPC cancels a handler when the caller cancels and when the deadline passes.
            remaining = context.time_remaining()
            is_late = remaining is not None and remaining <= _DEADLINE_MARGIN_S
            code = "DEADLINE_EXCEEDED" if is_late else "CANCELLED"
            raise
        except Exception:
            # An abort has set the code; anything else reaches the caller as UNKNOWN.
            code = _code_name(context.code()) if context.code() else "UNKNOWN"
            raise
        finally:
            span.set_attribute(RPC_STATUS_CODE, code)
            if code != "OK":
                fail(span, reason or code, code, is_fault=code in _SERVER_FAULTS)


def _code_name(code: Any) -> str:
    """The name of a status code, which a context gives as None, an enum or a number."""
    if not code:
        return "OK"
    if isinstance(code, grpc.StatusCode):
        return code.name
    return next((c.name for c in grpc.StatusCode if c.value[0] == code), "UNKNOWN")
