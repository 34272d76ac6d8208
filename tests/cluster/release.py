"""One release of the chart: what an operator does with it, and what callers see of it."""

import base64
import re
import shlex
from pathlib import Path
from typing import Any

from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.helm.chart import CHART, merged

_WAIT = ("--wait", "--timeout", "180s")
NAME = "hr-headrace"
# What Kubernetes itself puts into a namespace.
_OF_KUBERNETES = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
_KINDS = (
    "pods,services,configmaps,secrets,serviceaccounts,persistentvolumeclaims,deployments,"
    "statefulsets,replicasets,jobs,networkpolicies,poddisruptionbudgets,roles,rolebindings,leases"
)


class Release:
    """The release `hr` in one namespace."""

    def __init__(self, cluster: Cluster, namespace: str, models: Path) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self.values: Object = {
            "model": {"name": "/var/cache/headrace/stub", "servedName": "stub"},
            "modelCache": {"type": "hostPath", "hostPath": str(models)},
            "router": {"replicas": 2, "preStopSeconds": 1},
            "scheduler": {"replicas": 2},
            "pools": [{"name": "a", "replicas": 2}],
            "probes": {"periodSeconds": 2},
            "tests": {"deadlineSeconds": 120},
        }
        self.notes = ""

    def install(self) -> None:
        """`helm install`."""
        output = self._helm("install", "--create-namespace", *_WAIT, chart=True)
        self.notes = output.partition("NOTES:")[2]

    def upgrade(self, values: Object) -> None:
        """`helm upgrade` with values above those of the installation."""
        self._helm("upgrade", *_WAIT, chart=True, values=merged(self.values, values))

    def rollback(self) -> None:
        """`helm rollback` to the revision before."""
        self._helm("rollback", *_WAIT)

    def test(self) -> str:
        """What `helm test` prints, logs included."""
        return self._helm("test", "--logs", "--timeout", "120s")

    def uninstall(self) -> None:
        """`helm uninstall`; nothing may be left but what Kubernetes itself made."""
        self._helm("uninstall", *_WAIT)
        self.cluster.until(lambda: not self._left(), "end of all objects")

    def run_note(self, beginning: str) -> str:
        """What a command of the notes prints; its kubectl is ours, and a pipe is left out."""
        found = re.search(rf"^ *kubectl (.*{beginning}.*?)( \||$)", self.notes, re.MULTILINE)
        assert found is not None, self.notes
        return self.cluster.kubectl(*shlex.split(found[1]))

    def pods(self, component: str) -> list[Object]:
        """Pods of a component that are not on their way out."""
        return self.cluster.pods(self.namespace, component)

    def address(self) -> str:
        """Where callers reach the routers."""
        service: Any = self._get("services", f"{NAME}-router")
        return f"{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def token(self, key: str = "router-token") -> str:
        """A token of the release's Secret."""
        return base64.b64decode(self._get("secrets", f"{NAME}-tokens")["data"][key]).decode()

    def until_settled(self) -> None:
        """Wait until every pod is ready, and none is on its way out."""
        self.cluster.until(self._is_settled, "rest")

    def _is_settled(self) -> bool:
        pods = self.cluster.api.items(f"/api/v1/namespaces/{self.namespace}/pods")
        return all("deletionTimestamp" not in pod["metadata"] and _is_ready(pod) for pod in pods)

    def _left(self) -> list[str]:
        listed = self.cluster.kubectl(
            *("get", _KINDS, "--namespace", self.namespace, "--output"),
            "jsonpath={range .items[*]}{.kind} {.metadata.name}{'\\n'}{end}",
        )
        lines = (tuple(line.split()) for line in listed.splitlines() if line)
        return [" ".join(each) for each in lines if each not in _OF_KUBERNETES]

    def _get(self, kind: str, name: str) -> Object:
        try:
            return self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/{kind}/{name}")
        except ApiError as error:
            raise AssertionError(f"{kind}/{name}: {error}") from error

    def _helm(
        self, verb: str, *flags: str, chart: bool = False, values: Object | None = None
    ) -> str:
        return self.cluster.helm(
            *(verb, "hr", *((str(CHART),) if chart else ()), "--namespace", self.namespace, *flags),
            values=(self.values if values is None else values) if chart else None,
        )


def _is_ready(pod: Object) -> bool:
    statuses = pod["status"].get("containerStatuses") or []
    return bool(statuses) and all(each["ready"] for each in statuses)
