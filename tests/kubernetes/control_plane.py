"""A real Kubernetes control plane on loopback: etcd, kube-apiserver and kube-controller-manager.

The programs are looked for in the folder that KUBEBUILDER_ASSETS names (the convention of envtest),
and etcd also on PATH. There is no node: pods stay pending unless a test, or a kubelet of its own,
writes their status.
"""

import os
import secrets
import shutil
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import trustme
import yaml

from headrace.service.children import tied_to_us
from tests.headrace.status.servers import HOST, free_ports

ASSETS = "KUBEBUILDER_ASSETS"
_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
# What a chart's objects need; no controller that looks at nodes.
CONTROLLERS = (
    *("deployment", "replicaset", "statefulset", "job", "endpoint", "disruption"),
    *("garbagecollector", "namespace"),
)
_START_TIMEOUT_S = 100.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05


class ControlPlaneUnavailableError(Exception):
    """The programs are not there; the message says what to do."""


def find_programs() -> dict[str, str]:
    """The path of each program of the control plane."""
    if not (folder := os.environ.get(ASSETS)):
        raise ControlPlaneUnavailableError(
            f"{ASSETS} is not set; it names a folder with {', '.join(_PROGRAMS)}"
        )
    found = {name: shutil.which(name, path=folder) for name in _PROGRAMS}
    found["etcd"] = found["etcd"] or shutil.which("etcd")
    if lacking := [name for name, path in found.items() if path is None]:
        raise ControlPlaneUnavailableError(f"{ASSETS}={folder} has no {', '.join(lacking)}")
    return {name: path for name, path in found.items() if path is not None}


def no_open_port(program: str) -> list[str]:
    """The flag that closes the port on all addresses that programs had before Kubernetes 1.24."""
    return ["--port=0"] if "--port int" in _help(program) else []


def _help(program: str) -> str:
    return subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout


class ControlPlane:
    """One control plane; RBAC is on, and `admin_token` may do everything."""

    def __init__(self, folder: Path, controllers: Sequence[str] = CONTROLLERS) -> None:
        """folder: for its files; must exist."""
        self.programs = find_programs()
        self._folder = folder
        self._controllers = controllers
        self._etcd_port, self._etcd_peer_port, self._port = free_ports(3)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._num_namespaces = 0
        self.admin_token = secrets.token_urlsafe()
        self.ca_file = folder / "ca.crt"

    def __enter__(self) -> Self:
        self._write_files()
        try:
            self._start("etcd", self._etcd_flags())
            self.start_api_server()
            self._start("kube-controller-manager", self._controller_flags())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(_PROGRAMS):
            self._stop(name)

    @property
    def address(self) -> str:
        """host:port of the API server; stays the same when it is started again."""
        return f"{HOST}:{self._port}"

    def start_api_server(self) -> None:
        """Start the API server and wait until it is ready; the server ends with this thread."""
        self._start("kube-apiserver", self._api_server_flags())
        context = ssl.create_default_context(cafile=str(self.ca_file))
        request = urllib.request.Request(
            f"https://{self.address}/readyz",
            headers={"Authorization": f"Bearer {self.admin_token}"},
        )
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=2, context=context) as answer:
                    if answer.read() == b"ok":
                        return
            except urllib.error.HTTPError as error:
                last: OSError = error
                error.close()
            except OSError as error:
                last = error
            is_dead = self._running["kube-apiserver"].poll() is not None
            if is_dead or time.monotonic() > deadline:
                raise RuntimeError(f"kube-apiserver is not ready: {last}\n{self._log_tail()}")
            time.sleep(_POLL_S)

    def kill_api_server(self) -> None:
        """Kill the API server; what it has stored stays."""
        process = self._running.pop("kube-apiserver")
        process.kill()
        process.wait()

    def kubeconfig(self, token: str, *, namespace: str = "default", address: str = "") -> Path:
        """A new kubeconfig file; address: host:port of a proxy in front of the API server."""
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "it",
            "clusters": [
                {
                    "name": "it",
                    "cluster": {
                        "server": f"https://{address or self.address}",
                        "certificate-authority": str(self.ca_file),
                    },
                }
            ],
            "users": [{"name": "it", "user": {"token": token}}],
            "contexts": [
                {"name": "it", "context": {"cluster": "it", "user": "it", "namespace": namespace}}
            ],
        }
        file = self._folder / f"{secrets.token_hex(4)}.kubeconfig"
        file.write_text(yaml.safe_dump(content))
        return file

    def client(self, token: str = "") -> Any:
        """An ApiClient of the `kubernetes` package; the administrator's without a token."""
        import kubernetes

        configuration = kubernetes.client.Configuration(host=f"https://{self.address}")
        configuration.ssl_ca_cert = str(self.ca_file)
        configuration.api_key["authorization"] = f"Bearer {token or self.admin_token}"
        return kubernetes.client.ApiClient(configuration)

    def new_namespace(self) -> str:
        """Make a namespace; nobody takes it away before the control plane stops."""
        import kubernetes

        self._num_namespaces += 1
        name = f"test-{self._num_namespaces}"
        with self.client() as client:
            kubernetes.client.CoreV1Api(client).create_namespace({"metadata": {"name": name}})
        return name

    def service_account(self, namespace: str, name: str) -> str:
        """A token of a service account, which is made if it is not there yet."""
        import kubernetes

        with self.client() as client:
            api = kubernetes.client.CoreV1Api(client)
            try:
                api.create_namespaced_service_account(namespace, {"metadata": {"name": name}})
            except kubernetes.client.ApiException as error:
                if error.status != 409:
                    raise
            answer = api.create_namespaced_service_account_token(
                name, namespace, {"spec": {"audiences": []}}
            )
            return str(answer.status.token)

    def _start(self, name: str, flags: Sequence[str]) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                tied_to_us([self.programs[name], *flags]),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
            )

    def _stop(self, name: str) -> None:
        if (process := self._running.pop(name, None)) is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _log_tail(self) -> str:
        return (self._folder / "kube-apiserver.log").read_text(errors="replace")[-3000:]

    def _write_files(self) -> None:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        certificate = authority.issue_cert(HOST, "localhost")
        certificate.private_key_pem.write_to_path(str(self._folder / "server.key"))
        for i, part in enumerate(certificate.cert_chain_pems):
            part.write_to_path(str(self._folder / "server.crt"), append=i > 0)
        # Any key signs tokens of service accounts.
        signer = authority.issue_cert("tokens").private_key_pem
        signer.write_to_path(str(self._folder / "tokens.key"))
        (self._folder / "users.csv").write_text(
            f'{self.admin_token},admin,admin,"system:masters"\n'
        )
        self._admin_kubeconfig = self.kubeconfig(self.admin_token)

    def _etcd_flags(self) -> list[str]:
        url, peer = (f"http://{HOST}:{port}" for port in (self._etcd_port, self._etcd_peer_port))
        return [
            *("--name=it", f"--data-dir={self._folder / 'etcd'}", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={url}", f"--advertise-client-urls={url}"),
            *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
            f"--initial-cluster=it={peer}",
        ]

    def _api_server_flags(self) -> list[str]:
        folder = self._folder
        return [
            f"--etcd-servers=http://{HOST}:{self._etcd_port}",
            *(f"--bind-address={HOST}", f"--advertise-address={HOST}"),
            *(f"--secure-port={self._port}", "--endpoint-reconciler-type=none"),
            f"--tls-cert-file={folder / 'server.crt'}",
            f"--tls-private-key-file={folder / 'server.key'}",
            # On loopback, for tests that make the addresses of Services work.
            "--service-cluster-ip-range=127.2.0.0/16",
            "--authorization-mode=RBAC",
            f"--token-auth-file={folder / 'users.csv'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={folder / 'tokens.key'}",
            f"--service-account-signing-key-file={folder / 'tokens.key'}",
            *self._account_flags(),
        ]

    def _account_flags(self) -> list[str]:
        if "serviceaccount" not in self._controllers:
            # Pods of namespaces whose default account nobody makes would be refused.
            return ["--disable-admission-plugins=ServiceAccount"]
        # Tokens of accounts in projected volumes, as in every Kubernetes since 1.22.
        gate = "BoundServiceAccountTokenVolume=true"
        told = _help(self.programs["kube-apiserver"])
        return [f"--feature-gates={gate}"] if f"{gate}|false" in told else []

    def _controller_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self._admin_kubeconfig}",
            *(f"--bind-address={HOST}", "--secure-port=0", "--leader-elect=false"),
            f"--controllers={','.join(self._controllers)}",
            f"--root-ca-file={self.ca_file}",
            *no_open_port(self.programs["kube-controller-manager"]),
        ]
