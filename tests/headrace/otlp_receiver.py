"""A real OTLP/gRPC receiver of traces and metrics inside the test process."""

import threading
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class ReceivedSpan:
    """One exported span, ids as hex."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: dict[str, Any]
    status: int
    links: tuple[str, ...]
    begin_unix_ns: int = 0
    end_unix_ns: int = 0
    # Name and attributes.
    events: tuple[tuple[str, dict[str, Any]], ...] = ()


@dataclass(frozen=True)
class ReceivedMetric:
    """One point of an exported metric; the value of a histogram is its count."""

    service: str
    name: str
    attributes: dict[str, Any]
    value: float


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, receiver) -> None:
        self._receiver = receiver

    def Export(self, request, context):
        for group in request.resource_metrics:
            service = _values(group.resource.attributes).get("service.name", "")
            for scope in group.scope_metrics:
                points = [(metric, point) for metric in scope.metrics for point in _points(metric)]
                self._receiver.take([_point(service, *found) for found in points])
        return metrics_service_pb2.ExportMetricsServiceResponse()


def _points(metric):
    return getattr(metric, metric.WhichOneof("data")).data_points


def _point(service, metric, point) -> ReceivedMetric:
    if metric.WhichOneof("data") == "histogram":
        value = point.count
    else:
        value = getattr(point, point.WhichOneof("value"))
    return ReceivedMetric(service, metric.name, _values(point.attributes), value)


def _values(attributes):
    return {a.key: _value(a.value) for a in attributes}


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans and metrics; `wait` and `wait_metrics` block until enough have come."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.metrics: list[ReceivedMetric] = []
        self._news = threading.Condition()
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(self), self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.endpoint = f"http://127.0.0.1:{port}"
        self._server.start()

    def Export(self, request, context):
        with self._news:
            for group in request.resource_spans:
                service = _values(group.resource.attributes).get("service.name", "")
                for scope in group.scope_spans:
                    self.spans.extend(self._span(service, s) for s in scope.spans)
            self._news.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    @staticmethod
    def _span(service, span) -> ReceivedSpan:
        return ReceivedSpan(
            service=service,
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            kind=span.kind,
            attributes=_values(span.attributes),
            status=span.status.code,
            links=tuple(link.span_id.hex() for link in span.links),
            begin_unix_ns=span.start_time_unix_nano,
            end_unix_ns=span.end_time_unix_nano,
            events=tuple((event.name, _values(event.attributes)) for event in span.events),
        )

    def take(self, points) -> None:
        with self._news:
            self.metrics.extend(points)
            self._news.notify_all()

    def wait_metrics(self, num_points: int, timeout_s: float = 10.0) -> list[ReceivedMetric]:
        """The points of metrics, once there are that many."""
        with self._news:
            came = self._news.wait_for(lambda: len(self.metrics) >= num_points, timeout_s)
            assert came, f"{len(self.metrics)} points came, {num_points} wanted"
            return list(self.metrics)

    def wait(self, num_spans: int, timeout_s: float = 10.0) -> list[ReceivedSpan]:
        """The spans, once there are that many."""
        with self._news:
            came = self._news.wait_for(lambda: len(self.spans) >= num_spans, timeout_s)
            assert came, f"{len(self.spans)} spans came, {num_spans} wanted"
            return list(self.spans)

    def stop(self) -> None:
        self._server.stop(None).wait()
