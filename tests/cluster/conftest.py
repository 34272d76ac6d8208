"""A cluster, and two releases of the chart in one namespace of it."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos import stub_model
from tests.cluster.api import Object
from tests.cluster.cluster import Cluster
from tests.cluster.credentials import Credentials
from tests.cluster.release import NAMESPACE, Release, left
from tests.containers.runtime import RuntimeUnavailableError, need_programs
from tests.helm.chart import merged
from tests.helm.helm_binary import HelmUnavailableError, find_helm, find_kubectl
from tests.kubernetes.control_plane import ASSETS, ControlPlaneUnavailableError

RELEASE = "hr"
STUB = {"gpuworker": ["tini", "--", "python", "-m", "tests.cluster.stub_gpuworker"]}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A control plane and nodes; gpuworkers have the stub model."""
    try:
        need_programs("unshare", "mount")
    except RuntimeUnavailableError as error:
        pytest.skip(f"no cluster here: {error}")
    try:
        helm, kubectl = find_helm(), find_kubectl()
        made = Cluster(tmp_path_factory.mktemp("cluster"), helm, kubectl, STUB)
    except (HelmUnavailableError, ControlPlaneUnavailableError) as error:
        if os.environ.get("CI") and ASSETS in os.environ:
            raise
        pytest.skip(f"no cluster here: {error}")
    with made:
        yield made


@pytest.fixture(scope="module")
def credentials(cluster: Cluster) -> Credentials:
    """Certificates and API keys for `release`, in the namespace of both releases."""
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    folder = cluster.folder / "credentials"
    folder.mkdir()
    made = Credentials(cluster.api, NAMESPACE, f"{RELEASE}-headrace", folder)
    made.create()
    return made


@pytest.fixture(scope="module")
def releases(cluster: Cluster, credentials: Credentials) -> Iterator[dict[str, Release]]:
    """Installed releases by name; their removal must leave nothing.

    `release` has what a cluster is for: pods are found by labels, schedulers share the workers by
    Leases, ports are TLS, and clients have keys. `plain` has the defaults of the chart.
    """
    models = cluster.folder / "models"
    models.mkdir()
    stub_model.write_model(models / "stub")
    readable(models)
    plain = {
        "model": {"name": "/var/cache/headrace/stub", "servedName": "stub"},
        "modelCache": {"type": "hostPath", "hostPath": str(models)},
        "router": {"replicas": 1, "initContainers": [_said("before")]},
        "pools": [{"name": "a", "gpu": {"count": 0}}],
        "extraObjects": [_JOB],
        "probes": {"periodSeconds": 5},
        "tests": {"deadlineSeconds": 120},
    }
    complete = {
        "router": {"replicas": 2, "preStopSeconds": 1, "service": {"type": "NodePort"}},
        "gpuworker": {"config": {"gpuworker": {"stalled_after_s": 3}}},
        "scheduler": {"replicas": 2, "config": {"ownership": {"rebalance_after_s": 1}}},
        "pools": [
            {
                "name": "a",
                "autoscaling": {"type": "controller", "minReplicas": 2, "maxReplicas": 3},
            }
        ],
        "poolController": {
            "upAfterSeconds": 1,
            "downAfterSeconds": 1,
            "dwellSeconds": 0,
            "extraArgs": ["--interval-s=1"],
        },
        "discovery": {"type": "kubernetes"},
        "monitoring": {"enabled": True},
        "probes": {"type": "http", "periodSeconds": 1},
        **credentials.values,
    }
    made = {
        "plain": Release(cluster, "plain", plain),
        RELEASE: Release(cluster, RELEASE, merged(plain, complete)),
    }
    with ThreadPoolExecutor() as threads:
        list(threads.map(Release.install, made.values()))
        yield made
        list(threads.map(Release.uninstall, made.values()))
    credentials.delete()
    # As docs/kubernetes.md says.
    cluster.kubectl("delete", "leases", "--selector", "headrace/lease", "--namespace", NAMESPACE)
    cluster.until(lambda: not left(cluster), "end of all objects")


@pytest.fixture(scope="module")
def release(releases: dict[str, Release]) -> Release:
    """The release with everything."""
    return releases[RELEASE]


def _said(name: str) -> Object:
    """A container that prints its name and ends."""
    command = ["python", "-c", f"print('{name}')"]
    return {"name": name, "image": "headrace-router:0.1.0", "command": command}


_JOB = {
    "apiVersion": "batch/v1",
    "kind": "Job",
    "metadata": {"name": "{{ .Release.Name }}-job"},
    "spec": {"template": {"spec": {"restartPolicy": "Never", "containers": [_said("job")]}}},
}


def readable(folder: Path) -> None:
    """Gives a hostPath folder to the pods' user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65532, 65532)
