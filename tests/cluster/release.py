"""One release of the chart: what an operator does with it, and what callers see of it."""

import re
import shlex
from typing import Any

from tests.cluster.api import ApiError, Object
from tests.cluster.cluster import Cluster
from tests.cluster.network import NODE
from tests.helm.chart import CHART, merged

_WAIT = ("--wait", "--timeout", "120s")
NAMESPACE = "space"
# What Kubernetes itself puts into a namespace.
_OF_KUBERNETES = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
_KINDS = (
    "pods,services,configmaps,secrets,serviceaccounts,persistentvolumeclaims,deployments,"
    "statefulsets,replicasets,jobs,networkpolicies,poddisruptionbudgets,roles,rolebindings,leases"
)


class Release:
    """A release in a namespace."""

    def __init__(self, cluster: Cluster, name: str, values: Object) -> None:
        self.cluster = cluster
        self.namespace = NAMESPACE
        self.name = name
        self.full_name = f"{name}-headrace"
        self.values = values
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
        """`helm uninstall`."""
        self._helm("uninstall", *_WAIT)

    def run_note(self, beginning: str) -> str:
        """What a command of the notes prints; its kubectl is ours, and a pipe is left out."""
        found = re.search(rf"^ *kubectl (.*{beginning}.*?)( \||$)", self.notes, re.MULTILINE)
        assert found is not None, self.notes
        return self.cluster.kubectl(*shlex.split(found[1]))

    def pods(self, component: str) -> list[Object]:
        """Pods of a component that are not on their way out."""
        return self.cluster.pods(self.namespace, self.name, component)

    def address(self) -> str:
        """Where callers reach the routers."""
        service: Any = self._get("services", f"{self.full_name}-router")
        return f"{NODE}:{service['spec']['ports'][0]['nodePort']}"

    def owners(self) -> dict[str, str]:
        """The scheduler that owns each worker, by the Leases; "" for nobody."""
        path = f"/apis/coordination.k8s.io/v1/namespaces/{self.namespace}/leases"
        found = self.cluster.api.items(f"{path}?labelSelector=headrace/lease%3Dgpuworker")
        return {
            each["metadata"]["name"]: str(each["spec"].get("holderIdentity", "")).partition("/")[0]
            for each in found
        }

    def until_settled(self) -> None:
        """Wait until every pod is ready, and none is on its way out."""
        self.cluster.until(self.is_settled, "rest")

    def is_settled(self) -> bool:
        """Whether every pod that has not ended is ready, and none is on its way out."""
        path = f"/api/v1/namespaces/{self.namespace}/pods?fieldSelector=status.phase!%3DSucceeded"
        pods = self.cluster.api.items(path)
        return all("deletionTimestamp" not in pod["metadata"] and _is_ready(pod) for pod in pods)

    def _get(self, kind: str, name: str) -> Object:
        try:
            return self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/{kind}/{name}")
        except ApiError as error:
            raise AssertionError(f"{kind}/{name}: {error}") from error

    def _helm(
        self, verb: str, *flags: str, chart: bool = False, values: Object | None = None
    ) -> str:
        return self.cluster.helm(
            *(
                verb,
                self.name,
                *((str(CHART),) if chart else ()),
                "--namespace",
                self.namespace,
                *flags,
            ),
            values=(self.values if values is None else values) if chart else None,
        )


def left(cluster: Cluster) -> list[str]:
    """Objects of the namespace but those that Kubernetes itself has made."""
    listed = cluster.kubectl(
        *("get", _KINDS, "--namespace", NAMESPACE, "--output"),
        "jsonpath={range .items[*]}{.kind} {.metadata.name}{'\\n'}{end}",
    )
    lines = (tuple(line.split()) for line in listed.splitlines() if line)
    return [" ".join(each) for each in lines if each not in _OF_KUBERNETES]


def _is_ready(pod: Object) -> bool:
    statuses = pod["status"].get("containerStatuses") or []
    return bool(statuses) and all(each["ready"] for each in statuses)
