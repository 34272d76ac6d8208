"""Peers that are pods: those that a selector finds in a namespace.

A pod is a peer from when it has an address until it is gone; while it is being deleted, it leaves.
"""

import logging
from collections.abc import AsyncIterator
from functools import partial

from headrace.kubernetes.api import Api, Json, connect
from headrace.kubernetes.listing import Listing
from headrace.service.discovery import DiscoveryConfig
from headrace.service.peers import Peer

logger = logging.getLogger(__name__)

# Name of the port of every container of Headrace's pods.
_PORT = "grpc"


class PodPeers:
    """The pods under a selector; see PeerSource."""

    def __init__(self, config: DiscoveryConfig, selector: str) -> None:
        self._config = config
        self._selector = selector

    async def changes(self) -> AsyncIterator[frozenset[Peer]]:
        """The peers, and again after each change; for ever."""
        async with await connect(self._config) as api:
            last: frozenset[Peer] | None = None
            async for snapshot in list_pods(api, self._config, self._selector).snapshots():
                peers = frozenset(snapshot.objects.values())
                if peers != last:
                    last = peers
                    logger.info("%s: %s", self._selector, ", ".join(_words(peers)) or "no pod")
                    yield peers


def list_pods(api: Api, config: DiscoveryConfig, selector: str) -> Listing[Peer]:
    """The listing of a selector's pods, as peers."""
    path = f"/api/v1/namespaces/{api.namespace}/pods"
    return Listing(api, path, selector, partial(read_pod, config=config), config.interval_s)


def read_pod(pod: Json, config: DiscoveryConfig) -> Peer | None:
    """The peer that a pod is; None while the pod has no address, and when it has ended."""
    metadata, spec, status = pod["metadata"], pod["spec"], pod.get("status", {})
    if status.get("phase") in {"Succeeded", "Failed"}:
        return None
    host = status.get("podIP", "")
    if host and config.address == "name":
        parts = (spec.get("hostname"), spec.get("subdomain"), metadata["namespace"], "svc")
        host = ".".join(filter(None, (*parts, config.cluster_domain))) if all(parts) else ""
    ports = (port for c in spec["containers"] for port in c.get("ports", ()))
    port = next((p["containerPort"] for p in ports if p.get("name") == _PORT), None)
    if not host or port is None:
        return None
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Peer(metadata["name"], address, "deletionTimestamp" in metadata)


def _words(peers: frozenset[Peer]) -> list[str]:
    return [
        f"{peer.name} ({peer.address}{', leaving' if peer.is_leaving else ''})"
        for peer in sorted(peers)
    ]
