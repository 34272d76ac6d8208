"""Alerts and dashboard use only metrics and labels that exist."""

import json
import re
import shutil
import subprocess
from itertools import chain
from pathlib import Path

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
PAGE = Path(__file__).parents[2] / "docs" / "slow.md"
NAME = re.compile(r"\b(?:headrace|gen_ai)_\w+")
SELECTED = re.compile(r"((?:headrace|gen_ai)_\w+)\{([^}]*)\}")
GROUPED = re.compile(r"by \(([^)]*)\)")


def alerts():
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries():
    """What the dashboard and the page about slow requests ask Prometheus for."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    shown = [query["expr"] for panel in panels for query in panel.get("targets", ())]
    blocks = re.findall(r"```promql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    asked = [line for block in blocks for line in block.splitlines()]
    assert shown
    assert asked
    return [*shown, *asked]


def expressions():
    return [*queries(), *(rule["expr"] for rule in alerts())]


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


def test_each_alert_has_a_case_where_it_fires_and_one_where_it_does_not():
    tests = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    cases = [case for test in tests for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alerts()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


def promtool(*arguments):
    done = subprocess.run(
        ["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Prometheus' own")
def test_prometheus_takes_rules_and_queries_and_alerts_fire_when_they_should(tmp_path):
    # Grafana fills in its variables.
    filled = [re.sub(r"\$\w+", "5m", query) for query in queries()]
    rules = [{"record": f"query_{number}", "expr": query} for number, query in enumerate(filled)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    for arguments in (("check", "rules", RULES, file), ("test", "rules", CASES)):
        is_well, said = promtool(*arguments)
        assert is_well, said
    # The cases can fail: an alert that never fires does not pass them.
    never = re.sub(r"expr: >-\n( +)", r"expr: >-\n\1vector(0) > 1 and ", RULES.read_text())
    (tmp_path / "rules.yaml").write_text(never)
    (tmp_path / "rules.test.yaml").write_text(CASES.read_text())
    is_well, said = promtool("test", "rules", tmp_path / "rules.test.yaml")
    assert not is_well
    assert "alertname: HeadracePreemptionStorm" in said
