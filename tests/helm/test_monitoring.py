"""Alerts and dashboard use only metrics and labels that exist."""

import json
import re
import shutil
import subprocess
from itertools import chain

import pytest
import yaml

from docs.generate import METRICS_BY_TITLE
from headrace.service.exposition import prometheus_labels, prometheus_name
from headrace.service.metrics import Kind
from tests.helm.chart import CHART

METRICS = list(chain.from_iterable(METRICS_BY_TITLE.values()))
LABELS = {prometheus_name(metric): set(prometheus_labels(metric)) for metric in METRICS}
# What Prometheus adds when it scrapes.
TARGET = {"namespace", "job", "instance", "pod"}
RULES = CHART / "monitoring" / "rules.yaml"
CASES = CHART / "monitoring" / "rules.test.yaml"
DASHBOARD = CHART / "monitoring" / "dashboard.json"
NAME = re.compile(r"\b(?:headrace|gen_ai)_\w+")
SELECTED = re.compile(r"((?:headrace|gen_ai)_\w+)\{([^}]*)\}")
GROUPED = re.compile(r"by \(([^)]*)\)")


def alerts():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    found = [query["expr"] for panel in panels for query in panel.get("targets", ())]
    return [*found, *(rule["expr"] for rule in alerts())]


def series_of(metric):
    name = prometheus_name(metric)
    if metric.kind is Kind.HISTOGRAM:
        return {f"{name}{suffix}": name for suffix in ("_bucket", "_sum", "_count")}
    return {name: name}


SERIES = {series: name for metric in METRICS for series, name in series_of(metric).items()}


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_an_expression_uses_series_and_labels_that_exist(expression):
    names = set(NAME.findall(expression))
    assert names
    assert names <= SERIES.keys()
    for series, selector in SELECTED.findall(expression):
        used = set(re.findall(r"(\w+)(?:=|!)", selector))
        assert used <= LABELS[SERIES[series]] | TARGET
    known = TARGET.union(*(LABELS[SERIES[name]] for name in names)) | {"le"}
    for group in GROUPED.findall(expression):
        assert {label.strip() for label in group.split(",")} <= known


def test_each_alert_says_what_happened_and_what_to_do():
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names) >= 6
    for rule in alerts():
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert {"summary", "description"} <= rule["annotations"].keys()


def test_every_metric_has_its_own_name_in_prometheus():
    assert len(LABELS) == len(METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Prometheus' own")
def test_prometheus_takes_the_rules_and_they_fire_when_they_should():
    for command in (["check", "rules", str(RULES)], ["test", "rules", str(CASES)]):
        done = subprocess.run(
            ["promtool", *command], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
