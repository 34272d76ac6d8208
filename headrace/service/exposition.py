"""Readings of metrics as Prometheus' text and as OpenTelemetry's data."""

import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest

from headrace.service.metrics import Distribution, Kind, Labels, Metric, Points, Reading

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricsData
    from opentelemetry.sdk.resources import Resource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_UNIT_NAMES = {"s": "seconds", "By": "bytes", "1": "ratio"}


def prometheus_name(metric: Metric) -> str:
    """The name of a metric in Prometheus, by OpenTelemetry's rules.

    A histogram has series with _bucket, _sum and _count behind this name.
    """
    name = _plain(metric.name)
    unit = _UNIT_NAMES.get(metric.unit)
    if unit and not name.endswith(f"_{unit}"):
        name = f"{name}_{unit}"
    return f"{name}_total" if metric.kind is Kind.COUNTER else name


def prometheus_labels(metric: Metric) -> list[str]:
    """The names of a metric's labels in Prometheus."""
    return [_plain(label) for label in metric.labels]


def text(reading: Reading) -> bytes:
    """One metric in Prometheus' text format."""
    return generate_latest(_Collected(_family(*reading)))


def metrics_data(
    readings: Iterable[Reading], resource: "Resource", started_unix_ns: int
) -> "MetricsData":
    """All metrics in OpenTelemetry's data model, counted since started_unix_ns."""
    from opentelemetry.sdk.metrics import export
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    times = (started_unix_ns, time.time_ns())
    metrics = [
        export.Metric(metric.name, metric.description, metric.unit, _data(metric, points, *times))
        for metric, points in readings
        if points
    ]
    scope = export.ScopeMetrics(InstrumentationScope("headrace"), metrics, "")
    return export.MetricsData([export.ResourceMetrics(resource, [scope], "")])


def _plain(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)


class _Collected:
    """One metric, where prometheus_client expects a registry."""

    def __init__(self, family: Any) -> None:
        self._family = family

    def collect(self) -> Iterator[Any]:
        yield self._family


def _family(metric: Metric, points: Points) -> Any:
    name, labels = prometheus_name(metric), prometheus_labels(metric)
    family: Any
    match metric.kind:
        case Kind.COUNTER:
            family = CounterMetricFamily(name, metric.description, labels=labels)
        case Kind.GAUGE:
            family = GaugeMetricFamily(name, metric.description, labels=labels)
        case Kind.HISTOGRAM:
            family = HistogramMetricFamily(name, metric.description, labels=labels)
    for key, value in points.items():
        if isinstance(value, Distribution):
            family.add_metric(key, list(_cumulated(metric, value)), value.sum)
        else:
            family.add_metric(key, value)
    return family


def _cumulated(metric: Metric, found: Distribution) -> Iterator[tuple[str, int]]:
    """The upper bound of each bucket, and how many values are not above it."""
    total = 0
    for bound, count in zip((*metric.bounds, float("inf")), found.counts, strict=True):
        total += count
        yield _bound(bound), total


def _bound(bound: float) -> str:
    return "+Inf" if bound == float("inf") else str(bound)


def _data(metric: Metric, points: Points, start: int, now: int) -> Any:
    from opentelemetry.sdk.metrics import export

    cumulative = export.AggregationTemporality.CUMULATIVE
    if metric.kind is Kind.HISTOGRAM:
        return export.Histogram(
            [
                _histogram_point(metric, key, found, start, now)
                for key, found in points.items()
                if isinstance(found, Distribution)
            ],
            cumulative,
        )
    numbers = [
        export.NumberDataPoint(_attributes(metric, key), start, now, value)
        for key, value in points.items()
        if not isinstance(value, Distribution)
    ]
    if metric.kind is Kind.GAUGE:
        return export.Gauge(numbers)
    return export.Sum(numbers, cumulative, is_monotonic=True)


def _histogram_point(metric: Metric, key: Labels, found: Distribution, start: int, now: int) -> Any:
    from opentelemetry.sdk.metrics import export

    unknown: Any = None  # the least and the greatest value are optional on the wire
    return export.HistogramDataPoint(
        attributes=_attributes(metric, key),
        start_time_unix_nano=start,
        time_unix_nano=now,
        count=found.count,
        sum=found.sum,
        bucket_counts=found.counts,
        explicit_bounds=metric.bounds,
        min=unknown,
        max=unknown,
    )


def _attributes(metric: Metric, key: Labels) -> dict[str, str]:
    return {name: value for name, value in zip(metric.labels, key, strict=True) if value}
