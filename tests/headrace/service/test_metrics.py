"""Counting, and what a scrape and a collector get of it."""

import pytest
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.resources import Resource
from prometheus_client.parser import text_string_to_metric_families

from headrace.service import exposition
from headrace.service.metrics import BoundedLabel, Recorder, counter, gauge, histogram

CALLS = counter("demo.calls", "{call}", "Calls.", ("demo.kind",))
WAIT = histogram("demo.wait", "s", "Waits.", ("kind",), bounds=(0.1, 1.0, 10.0))
SIZE = gauge("demo.size", "By", "Size.")


def series_of(*readings):
    text = b"".join(map(exposition.text, readings)).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def waits():
    recorder = Recorder(WAIT)
    for value in (0.05, 0.1, 0.5, 100.0):
        recorder.record(value, ("a",))
    recorder.record(2.0, ("b",))
    return recorder


def test_a_scrape_has_names_units_and_labels_by_opentelemetrys_rules():
    series = series_of((CALLS, {("x",): 3, ('y\n"z"',): 4}), (SIZE, {(): 7}))
    assert series == {
        ("demo_calls_total", (("demo_kind", "x"),)): 3,
        ("demo_calls_total", (("demo_kind", 'y\n"z"'),)): 4,
        ("demo_size_bytes", ()): 7,
    }


def test_a_histogram_counts_values_up_to_and_with_each_bound():
    series = series_of(waits().read())
    buckets = [
        value
        for (name, labels), value in series.items()
        if name == "demo_wait_seconds_bucket" and ("kind", "a") in labels
    ]
    assert buckets == [2, 3, 3, 4]
    assert series["demo_wait_seconds_count", (("kind", "a"),)] == 4
    assert series["demo_wait_seconds_sum", (("kind", "a"),)] == pytest.approx(100.65)
    assert series["demo_wait_seconds_count", (("kind", "b"),)] == 1


def test_a_reading_does_not_change_with_what_is_recorded_later():
    recorder = waits()
    _, points = recorder.read()
    recorder.record(0.5, ("a",))
    assert points["a",].count == 4


def test_a_collector_gets_the_same_numbers():
    readings = [(CALLS, {("x",): 3, ("",): 1}), (SIZE, {(): 7}), waits().read()]
    data = exposition.metrics_data(readings, Resource({"service.name": "demo"}), 1)
    (resource,) = encode_metrics(data).resource_metrics
    calls, size, wait = resource.scope_metrics[0].metrics
    assert (calls.name, calls.unit, calls.sum.is_monotonic) == ("demo.calls", "{call}", True)
    assert [point.as_int for point in calls.sum.data_points] == [3, 1]
    # An empty label is an absent attribute.
    assert [len(point.attributes) for point in calls.sum.data_points] == [1, 0]
    assert [point.as_int for point in size.gauge.data_points] == [7]
    point = wait.histogram.data_points[0]
    assert (list(point.bucket_counts), list(point.explicit_bounds)) == ([2, 1, 0, 1], [0.1, 1, 10])
    assert (point.count, point.start_time_unix_nano) == (4, 1)
    assert not point.HasField("min")


def test_a_bounded_label_keeps_known_names_and_folds_the_rest():
    label = BoundedLabel(["gold"], max_values=3)
    assert [label.of(f"t{number}") for number in range(5)] == ["t0", "t1", *["other"] * 3]
    assert (label.of("gold"), label.of("t1"), label.of("t4")) == ("gold", "t1", "other")
