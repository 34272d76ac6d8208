"""What the chart looks up in the cluster that it is installed into."""

import json

import kubernetes
import pytest

from tests.helm.cases import SUPPLIED
from tests.helm.chart import CHART, Chart, RefusedError
from tests.kubernetes.cluster import Namespace
from tests.kubernetes.control_plane import ControlPlane

VALUES = {
    "auth": {"existingSecret": "tokens", "apiKeys": {"existingSecret": "keys", "key": "hashes"}},
    "monitoring": {"enabled": True},
    "hfToken": {"existingSecret": "hub"},
    "store": {"type": "external", "external": {"existingSecret": "redis"}},
    "tls": SUPPLIED,
}
# The keys that each Secret needs, by the value that names it.
NEEDED = {
    ("auth.existingSecret", "tokens"): (
        *("router-token", "scheduler-token", "gpuworker-token"),
        "metrics-token",
    ),
    ("auth.apiKeys.existingSecret", "keys"): ("hashes",),
    ("hfToken.existingSecret", "hub"): ("token",),
    ("store.external.existingSecret", "redis"): ("url",),
    ("tls.existingSecrets.scheduler", "scheduler-cert"): ("tls.crt", "tls.key", "ca.crt"),
}


def test_a_secret_that_lacks_a_key_is_refused_before_pods_wait_for_it(
    control_plane: ControlPlane, chart: Chart
):
    namespace = Namespace(control_plane)
    # A Secret that is not there may come later: pods wait for it, and their events say so.
    install(chart, namespace)
    with control_plane.client() as client:
        api = kubernetes.client.CoreV1Api(client)
        for (value, name), keys in NEEDED.items():
            *has, lacks = keys
            body = {"metadata": {"name": name}, "data": dict.fromkeys(has, "dg==")}
            api.create_namespaced_secret(namespace.name, body)
            with pytest.raises(
                RefusedError, match=f"{value}: the Secret {name} has no key {lacks}"
            ):
                install(chart, namespace)
            body["data"][lacks] = "dg=="
            api.replace_namespaced_secret(name, namespace.name, body)
    install(chart, namespace)


def install(chart: Chart, namespace: Namespace) -> None:
    """`helm install` as far as it goes without changing anything."""
    chart.run(
        *("install", "hr", str(CHART), "--dry-run=server", "--namespace", namespace.name),
        *("--kubeconfig", str(namespace.kubeconfig()), "--values", "-"),
        given=json.dumps(VALUES),
    )
