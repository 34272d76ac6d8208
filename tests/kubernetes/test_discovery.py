"""Discovery of pods, against a real API server."""

import asyncio

import pytest

from headrace.kubernetes.pods import PodPeers, read_pod
from headrace.service.config import ConfigError
from headrace.service.discovery import DiscoveryConfig, open_source
from headrace.service.peers import Peer
from tests.chaos.proxy import Proxy
from tests.kubernetes.cluster import WORKERS, Namespace, Sets
from tests.kubernetes.control_plane import ControlPlane

RUNNING = {
    "metadata": {"name": "w-0", "namespace": "ns"},
    "spec": {
        "hostname": "w-0",
        "subdomain": "w",
        "containers": [
            {"name": "sidecar"},
            {"name": "gpuworker", "ports": [{"name": "grpc", "containerPort": 8702}]},
        ],
    },
    "status": {"phase": "Running", "podIP": "10.0.0.7"},
}
BY_IP = DiscoveryConfig(type="kubernetes")


def changed(section, **values):
    return RUNNING | {section: RUNNING[section] | values}


@pytest.mark.parametrize(
    ("pod", "config", "peer"),
    [
        (RUNNING, BY_IP, Peer("w-0", "10.0.0.7:8702")),
        (changed("status", podIP="fd00::7"), BY_IP, Peer("w-0", "[fd00::7]:8702")),
        (changed("metadata", deletionTimestamp="t"), BY_IP, Peer("w-0", "10.0.0.7:8702", True)),
        (changed("status", podIP=""), BY_IP, None),
        (changed("status", phase="Failed"), BY_IP, None),
        (changed("spec", containers=[{"name": "other"}]), BY_IP, None),
        (
            RUNNING,
            DiscoveryConfig(address="name"),
            Peer("w-0", "w-0.w.ns.svc.cluster.local:8702"),
        ),
        (
            RUNNING,
            DiscoveryConfig(address="name", cluster_domain=""),
            Peer("w-0", "w-0.w.ns.svc:8702"),
        ),
        (changed("spec", subdomain=None), DiscoveryConfig(address="name"), None),
    ],
)
def test_a_pod_is_a_peer_when_it_can_be_reached(pod, config, peer):
    assert read_pod(pod, config) == peer


def test_a_kubeconfig_that_is_not_there_is_said_before_the_service_starts():
    config = DiscoveryConfig(type="kubernetes", kubeconfig="/nowhere")
    with pytest.raises(ConfigError, match="give --discovery-kubeconfig"):
        open_source(config, [], WORKERS, flag="worker")


async def test_pods_come_leave_and_go(control_plane: ControlPlane):
    namespace = Namespace(control_plane)
    namespace.add_pod("w-0", "127.0.0.1:7000")
    namespace.add_pod("s-0", "127.0.0.1:7001", selector="app.kubernetes.io/component=scheduler")
    async with Sets(PodPeers(namespace.discovery(), WORKERS)) as sets:
        await sets.until(lambda peers: peers.keys() == {"w-0"})
        namespace.add_pod("w-1")
        namespace.add_pod("w-2", "127.0.0.1:7002")
        await sets.until(lambda peers: peers.keys() == {"w-0", "w-2"})
        namespace.set_status("w-1", {"podIP": "127.0.0.9"})
        await sets.until(lambda peers: peers.keys() == {"w-0", "w-1", "w-2"})
        assert sets.latest["w-1"] == Peer("w-1", "127.0.0.9:1")
        namespace.delete_pod("w-0")
        await sets.until(lambda peers: peers["w-0"].is_leaving)
        namespace.delete_pod("w-0", grace_s=0)
        await sets.until(lambda peers: peers.keys() == {"w-1", "w-2"})


async def test_a_watch_that_goes_silent_is_not_believed_for_longer_than_it_lasts(
    control_plane: ControlPlane,
):
    namespace = Namespace(control_plane)
    async with Proxy("api", control_plane.address) as proxy:
        config = namespace.discovery(address=proxy.address, interval_s=1.0)
        async with Sets(PodPeers(config, WORKERS)) as sets:
            namespace.add_pod("w-0", "127.0.0.1:7000")
            await sets.until(lambda peers: "w-0" in peers)
            # What is open stays silent for good; a new connection passes.
            for end in proxy.ends:
                end._is_held = True
            namespace.add_pod("w-1", "127.0.0.1:7001")
            await sets.until(lambda peers: "w-1" in peers)
            proxy.reset()


async def test_nothing_is_forgotten_while_the_api_server_is_away(
    control_plane: ControlPlane, caplog
):
    namespace = Namespace(control_plane)
    namespace.add_pod("w-0", "127.0.0.1:7000")
    async with Sets(PodPeers(namespace.discovery(), WORKERS)) as sets:
        await sets.until(lambda peers: "w-0" in peers)
        control_plane.kill_api_server()
        async with asyncio.timeout(30):
            while "cannot list" not in caplog.text:  # noqa: ASYNC110 a log has no event
                await asyncio.sleep(0.02)
        assert "w-0" in sets.latest
        control_plane.start_api_server()
        namespace.add_pod("w-1", "127.0.0.1:7001")
        await sets.until(lambda peers: peers.keys() == {"w-0", "w-1"})
