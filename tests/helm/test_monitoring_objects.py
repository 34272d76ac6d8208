"""The chart's admin port: who may reach it, what it asks for, and what is made for Prometheus."""

import json
import tomllib

import pytest
import yaml

from tests.helm.cases import MONITORING, SUPPLIED
from tests.helm.chart import CHART, RefusedError

COMPONENTS = ("router", "scheduler", "gpuworker")


def of_kind(objects, kind):
    return [each for each in objects if each["kind"] == kind]


def containers(objects):
    pods = [*of_kind(objects, "Deployment"), *of_kind(objects, "StatefulSet")]
    found = {c["name"]: c for pod in pods for c in pod["spec"]["template"]["spec"]["containers"]}
    return {name: found[name] for name in COMPONENTS}


def admin_settings(objects):
    files = [text for each in of_kind(objects, "ConfigMap") for text in each["data"].items()]
    return [tomllib.loads(text).get("admin") for name, text in files if name.endswith(".toml")]


def test_there_is_no_admin_port_unless_asked_for(chart):
    objects = chart.render({})
    assert set(map(str, admin_settings(objects))) == {"None"}
    assert all(len(c["ports"]) == 1 for c in containers(objects).values())


def test_probes_over_http_ask_the_admin_port(chart):
    objects = chart.render({"monitoring": MONITORING, "probes": {"type": "http"}})
    for container in containers(objects).values():
        assert {"name": "admin", "containerPort": 8710, "protocol": "TCP"} in container["ports"]
        get = container["readinessProbe"]["httpGet"]
        assert get == {"path": "/readyz", "port": "admin", "scheme": "HTTP"}
        assert container["startupProbe"]["httpGet"]["path"] == "/readyz"
        assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_metrics_want_the_token_that_the_pod_monitor_sends(chart):
    objects = chart.render({"monitoring": MONITORING, "tls": SUPPLIED})
    for admin in admin_settings(objects):
        assert admin["metrics_token_file"] == "/etc/headrace/tokens/metrics-token"
        # The full token of the service's own port opens the other pages.
        assert admin["auth_token_file"] != admin["metrics_token_file"]
        assert admin["tls_cert_file"] == "/etc/headrace/tls/tls.crt"
    pods = [*of_kind(objects, "Deployment"), *of_kind(objects, "StatefulSet")]
    mounted = {
        each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: item["path"]
        for each in pods
        for volume in each["spec"]["template"]["spec"]["volumes"]
        for item in volume.get("secret", {}).get("items", ())
        if item["key"] == "metrics-token"
    }
    assert mounted == dict.fromkeys(COMPONENTS, "metrics-token")
    monitors = {each["metadata"]["name"]: each for each in of_kind(objects, "PodMonitor")}
    assert len(monitors) == 3
    for component in COMPONENTS:
        monitor = next(m for name, m in monitors.items() if name.endswith(component))
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["authorization"]["credentials"]["key"] == "metrics-token"
        assert endpoint["scheme"] == "https"
        assert endpoint["tlsConfig"]["ca"]["secret"]["name"] == f"{component}-cert"


def test_only_scrapers_reach_the_admin_port(chart):
    for scrapers in ([], MONITORING["scrapers"]):
        monitoring = MONITORING | {"scrapers": scrapers}
        policies = of_kind(chart.render({"monitoring": monitoring}), "NetworkPolicy")
        rules = [rule for policy in policies for rule in policy["spec"]["ingress"]]
        open_to = [r["from"] for r in rules if r["ports"][0]["port"] == 8710]
        assert open_to == [scrapers] * (3 if scrapers else 0)


def test_rules_and_dashboard_are_the_files_beside_the_chart(chart):
    objects = chart.render({"monitoring": MONITORING})
    (rule,) = of_kind(objects, "PrometheusRule")
    text = (CHART / "monitoring" / "rules.yaml").read_text(encoding="utf-8")
    assert rule["spec"] == yaml.safe_load(text)
    (data,) = [c["data"] for c in of_kind(objects, "ConfigMap") if "headrace.json" in c["data"]]
    text = (CHART / "monitoring" / "dashboard.json").read_text(encoding="utf-8")
    assert json.loads(data["headrace.json"]) == json.loads(text)


def test_pod_monitors_need_the_port(chart):
    with pytest.raises(RefusedError, match=r"needs monitoring\.enabled"):
        chart.render({"monitoring": {"podMonitors": {"enabled": True}}})
