"""A Kubernetes cluster on this machine: a real control plane, and nodes that run containers."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from headrace.service.children import tied_to_us
from tests.cluster.api import Api, ApiError, Object
from tests.kubernetes.control_plane import (
    CONTROLLERS,
    ControlPlane,
    ControlPlaneUnavailableError,
    no_open_port,
)

ROOT = Path(__file__).parents[2]
NODES = {"cpu-0": 0, "gpu-0": 2, "gpu-1": 2}
_STOP_TIMEOUT_S = 30


class CommandError(Exception):
    """helm or kubectl failed; the message is what was printed."""


class Cluster:
    """One cluster; pods run as soon as they are made."""

    def __init__(
        self, folder: Path, helm: Path, kubectl: Path, replaced: Mapping[str, Sequence[str]]
    ) -> None:
        """replaced: entrypoints of services instead of those of their images."""
        self.folder = folder
        self._helm = helm
        self._kubectl = kubectl
        self._replaced = replaced
        controllers = (*CONTROLLERS, "serviceaccount", "root-ca-cert-publisher")
        self._plane = ControlPlane(_made(folder / "plane"), controllers)
        assets = Path(self._plane.programs["kube-apiserver"]).parent
        self._scheduler = str(assets / "kube-scheduler")
        if not Path(self._scheduler).exists():
            raise ControlPlaneUnavailableError(f"{assets} has no kube-scheduler")
        self._stack = contextlib.ExitStack()
        self.api: Api

    def __enter__(self) -> "Cluster":
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._plane)
            plane = self._plane
            self.api = Api(plane.address, plane.admin_token, plane.ca_file)
            self._kubeconfig = str(plane.kubeconfig(plane.admin_token))
            stack.enter_context(
                self._process(
                    "kube-scheduler",
                    *(self._scheduler, f"--kubeconfig={self._kubeconfig}", "--leader-elect=false"),
                    *("--bind-address=127.0.0.1", "--secure-port=0"),
                    *no_open_port(self._scheduler),
                )
            )
            token = self.folder / "token"
            token.write_text(plane.admin_token)
            stack.enter_context(
                self._process(
                    "kubelet",
                    *("unshare", "--mount", "--propagation", "private"),
                    *(sys.executable, "-m", "tests.cluster.kubelet", "--server", plane.address),
                    *("--token-file", str(token), "--ca-file", str(plane.ca_file)),
                    *("--folder", str(_made(self.folder / "kubelet"))),
                    *(f"--node={name}={num}" for name, num in NODES.items()),
                    *("--replaced", json.dumps(dict(self._replaced))),
                )
            )
            self.until(lambda: len(self.api.items("/api/v1/nodes")) == len(NODES), "nodes", 60)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def helm(self, *arguments: str, values: Object | None = None) -> str:
        """What helm prints."""
        given = () if values is None else ("--values", "-")
        command = [str(self._helm), "--kubeconfig", self._kubeconfig, *arguments, *given]
        return _run(command, None if values is None else yaml.safe_dump(values))

    def kubectl(self, *arguments: str) -> str:
        """What kubectl prints."""
        return _run([str(self._kubectl), "--kubeconfig", self._kubeconfig, *arguments])

    def pods(self, namespace: str, release: str, component: str) -> list[Object]:
        """Pods of a release that are not being deleted."""
        labels = {"instance": release, "component": component}
        selector = ",".join(f"app.kubernetes.io/{name}%3D{value}" for name, value in labels.items())
        found = self.api.items(f"/api/v1/namespaces/{namespace}/pods?labelSelector={selector}")
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def volume(self, pod: Object, name: str) -> Path:
        """The folder of a pod's volume."""
        return self.folder / "kubelet" / "pods" / pod["metadata"]["uid"] / "volumes" / name

    def logs(self) -> str:
        """The end of each log, for the message of a test that failed."""
        kubelet = self.folder / "kubelet"
        files = [self.folder / "kubelet.log", *kubelet.glob("pods/*/*/log")]
        return "\n".join(f"== {f}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
        """Return once the condition holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(ApiError):
                if condition():
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what} within {timeout_s} s\n{self.logs()}")
            time.sleep(0.1)

    @contextlib.contextmanager
    def _process(self, name: str, *command: str) -> Iterator[None]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                tied_to_us(command), cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _run(command: list[str], given: str | None = None) -> str:
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        raise CommandError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout
