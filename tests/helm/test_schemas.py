"""Every object of every case, against the strict schemas of ten versions of Kubernetes."""

import functools
import json
import re

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.cert_manager import v1 as cert_manager
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

from tests.helm.cases import CASES
from tests.helm.chart import CHART

VERSIONS = [f"1.{minor}" for minor in range(28, 38)]
CUSTOM = {
    ("cert-manager.io/v1", "Certificate"): cert_manager.Certificate,
    ("cert-manager.io/v1", "Issuer"): cert_manager.Issuer,
    ("keda.sh/v1alpha1", "ScaledObject"): keda.ScaledObject,
    ("monitoring.coreos.com/v1", "PodMonitor"): prometheus.PodMonitor,
    ("monitoring.coreos.com/v1", "PrometheusRule"): prometheus.PrometheusRule,
}
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def seen():
    """Versions and objects that were found to be valid; schemas are read once meanwhile."""
    utils = kubernetes_validate.utils
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield set()


def unknown_fields(given, understood, path=""):
    """Paths in `given` that a model left out."""
    if isinstance(given, dict):
        for key, value in given.items():
            if not isinstance(understood, dict) or key not in understood:
                yield f"{path}.{key}"
            else:
                yield from unknown_fields(value, understood[key], f"{path}.{key}")
    elif isinstance(given, list):
        for index, value in enumerate(given):
            yield from unknown_fields(value, understood[index], f"{path}[{index}]")


def check(each, version):
    """Raises for a field that Kubernetes does not know, or a kind without a schema."""
    if each["kind"] == "LeaderWorkerSet":
        return check_groups(each, version)
    model = CUSTOM.get((each["apiVersion"], each["kind"]))
    if model is None:
        kubernetes_validate.validate(each, version, strict=True)
        return None
    understood = model.model_validate(each).model_dump(
        by_alias=True, exclude_unset=True, mode="json"
    )
    assert list(unknown_fields(each, understood)) == []
    return None


def check_groups(each, version):
    """The fields of leaderworkerset.x-k8s.io/v1, of which no package has models."""
    assert each["apiVersion"] == "leaderworkerset.x-k8s.io/v1"
    spec = each["spec"]
    template = spec["leaderWorkerTemplate"]
    assert spec.keys() == {"replicas", "leaderWorkerTemplate"}
    assert template.keys() == {"size", "restartPolicy", "workerTemplate"}
    assert template["restartPolicy"] in {"RecreateGroupOnPodRestart", "None"}
    pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}}
    check({**pods, "template": template["workerTemplate"]}, version)


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_knows_every_field(chart, case, seen):
    for each in chart.render(CASES[case]):
        for version in VERSIONS:
            key = (version, json.dumps(each))
            if key not in seen:
                check(each, version)
                seen.add(key)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_is_valid(chart, file):
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    for each in chart.render(values, is_secret_given=False):
        for version in (VERSIONS[0], VERSIONS[-1]):
            check(each, version)


def test_the_values_on_the_page_are_values(chart):
    page = (CHART.parents[1] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert blocks
    for block in blocks:
        assert chart.render(yaml.safe_load(block))


def test_a_field_or_a_kind_that_nobody_knows_is_found():
    claim = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "dta": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        check(claim, "1.33")
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "x.io/v1", "kind": "Unknown", "metadata": {}}, "1.33")
    certificate = {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Certificate",
        "metadata": {"name": "x"},
        "spec": {"secretName": "x", "issuerRef": {"name": "x"}, "dnsName": ["x"]},
    }
    with pytest.raises(AssertionError):
        check(certificate, "1.33")


@pytest.mark.parametrize("case", ["defaults", "everything extra", "tls of cert-manager"])
def test_lint_finds_nothing(chart, case, tmp_path):
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(CASES[case]))
    assert "0 chart(s) failed" in chart.run("lint", "--strict", str(CHART), "--values", str(file))


def test_objects_have_their_names_once(chart):
    for case, values in CASES.items():
        objects = chart.render(values)
        names = [(each["kind"], each["metadata"]["name"]) for each in objects]
        assert len(set(names)) == len(names), case
