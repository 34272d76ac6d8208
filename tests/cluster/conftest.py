"""A cluster, and a release of the chart in it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos import stub_model
from tests.cluster.cluster import Cluster
from tests.cluster.release import Release
from tests.containers.runtime import RuntimeUnavailableError, need_programs
from tests.helm.helm_binary import HelmUnavailableError, find_helm, find_kubectl
from tests.kubernetes.control_plane import ASSETS, ControlPlaneUnavailableError

STUB = {"gpuworker": ["python", "-m", "tests.cluster.stub_gpuworker"]}


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
def release(cluster: Cluster) -> Iterator[Release]:
    """An installed release; its removal must leave nothing."""
    models = cluster.folder / "models"
    models.mkdir()
    stub_model.write_model(models / "stub")
    readable(models)
    made = Release(cluster, "space", models)
    made.install()
    yield made
    made.uninstall()


def readable(folder: Path) -> None:
    """Gives a hostPath folder to the pods' user."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65532, 65532)
