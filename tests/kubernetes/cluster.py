"""A namespace of the control plane, with pods whose status the test writes, as a kubelet would."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes

from headrace.service.discovery import DiscoveryConfig
from tests.kubernetes.control_plane import ControlPlane

WORKERS = "app.kubernetes.io/component=gpuworker"
SCHEDULERS = "app.kubernetes.io/component=scheduler"


class Namespace:
    """A new namespace; what is in it stays until the control plane ends."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.name = plane.new_namespace()

    def add_pod(
        self, name: str, address: str = "", *, selector: str = WORKERS, **spec: object
    ) -> None:
        """A pod that runs at host:port, or is pending without an address."""
        host, _, port = (address or ":1").rpartition(":")
        label, _, value = selector.partition("=")
        container = {
            "name": "service",
            "image": "none",
            "ports": [{"name": "grpc", "containerPort": int(port)}],
        }
        body = {
            "metadata": {"name": name, "labels": {label: value}},
            # A pod without a node would be gone as soon as it is deleted.
            "spec": {"nodeName": "node", "containers": [container], **spec},
        }
        self._do(lambda api: api.create_namespaced_pod(self.name, body))
        if address:
            self.set_status(name, {"phase": "Running", "podIP": host})

    def set_status(self, name: str, status: Mapping[str, Any]) -> None:
        body = {"status": dict(status)}
        self._do(lambda api: api.patch_namespaced_pod_status(name, self.name, body))

    def delete_pod(self, name: str, *, grace_s: int = 60) -> None:
        """Delete a pod: at once without a grace, else the pod stays until it is deleted so."""
        self._do(
            lambda api: api.delete_namespaced_pod(name, self.name, grace_period_seconds=grace_s)
        )

    def discovery(self, token: str = "", address: str = "", **settings: Any) -> DiscoveryConfig:
        """The settings that find pods here; address: of a proxy before the API server."""
        return DiscoveryConfig(
            **({"type": "kubernetes", "interval_s": 5.0} | settings),
            kubeconfig=str(self.kubeconfig(token, address)),
        )

    def kubeconfig(self, token: str = "", address: str = "") -> Path:
        return self.plane.kubeconfig(
            token or self.plane.admin_token, namespace=self.name, address=address
        )

    def _do(self, call: Any) -> Any:
        with self.plane.client() as client:
            return call(kubernetes.client.CoreV1Api(client))


class Sets:
    """The sets that a source yields, in the background."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self.latest: dict[str, Any] = {}
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "Sets":
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        assert self._task.cancelled(), self._task.exception()

    async def until(self, condition: Any) -> None:
        """Wait for a set of peers by name."""
        try:
            async with asyncio.timeout(30):
                while not condition(self.latest):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"it stays {self.latest}") from None

    async def _read(self) -> None:
        async for peers in self._source.changes():
            self.latest = {peer.name: peer for peer in peers}
            self._changed.set()
