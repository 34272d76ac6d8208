"""`python -m tests.cluster.kubelet`: nodes whose pods are containers on this machine.

Registers nodes, runs the pods that the cluster's scheduler binds to them, answers for their logs,
and makes the names and addresses of Services work. Run it in a mount namespace of its own
(`unshare --mount`), so that nothing stays mounted when it ends, however it ends.
"""

import asyncio
import contextlib
import http.server
import logging
import os
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import click
import trustme

from tests.cluster.api import MERGE, Api, ApiError, Object
from tests.cluster.images import Images, parse_replaced
from tests.cluster.network import NODE, Network
from tests.cluster.pod import Machine, PodRunner, now

logger = logging.getLogger("kubelet")
_WATCH_S = 30
_RETRY_S = 0.2


class Kubelet:
    """Runs the pods of some nodes."""

    def __init__(self, machine: Machine, nodes: dict[str, int], folder: Path) -> None:
        """nodes: number of GPUs by name."""
        self._machine = machine
        self._nodes = nodes
        self._folder = folder
        self._pods: dict[str, PodRunner] = {}
        self._by_name: dict[tuple[str, str], PodRunner] = {}

    def register(self, log_port: int) -> None:
        """Make the nodes, ready to run pods."""
        for name, num_gpus in self._nodes.items():
            self._register(name, num_gpus, log_port)

    def follow(self) -> None:
        """Follows pods for good."""
        while True:
            try:
                for kind, pod in self._machine.api.watch("/api/v1/pods", _WATCH_S):
                    self._take(kind, pod)
            except (ApiError, OSError) as error:
                logger.warning("watch: %s", error)
                threading.Event().wait(_RETRY_S)

    def refresh(self, volume: str, plural: str) -> None:
        """Shows pods what changes of what their volumes show, for good.

        volume: secret or configMap; plural: the same as the API server calls it.
        """
        while True:
            try:
                for kind, each in self._machine.api.watch(f"/api/v1/{plural}", _WATCH_S):
                    if kind != "DELETED":
                        metadata = each["metadata"]
                        for runner in self._running_in(metadata["namespace"]):
                            runner.refresh(volume, metadata["name"])
            except (ApiError, OSError) as error:
                logger.warning("watch: %s", error)
                threading.Event().wait(_RETRY_S)

    def _running_in(self, namespace: str) -> list[PodRunner]:
        return [
            runner
            for (place, _), runner in list(self._by_name.items())
            if place == namespace and runner.is_alive()
        ]

    def log(self, namespace: str, name: str, container: str) -> str:
        """What a container has printed."""
        runner = self._by_name.get((namespace, name))
        return runner.log(container) if runner else ""

    def close(self) -> None:
        """Kill all containers."""
        for runner in self._pods.values():
            runner.forget()
            runner.delete(0)
        for runner in self._pods.values():
            runner.join(10)

    def _take(self, kind: str, pod: Object) -> None:
        metadata = pod["metadata"]
        if pod["spec"].get("nodeName") not in self._nodes:
            return
        runner = self._pods.get(metadata["uid"])
        if kind == "DELETED":
            if runner:
                runner.forget()
            return
        if runner is None:
            if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
                return
            runner = PodRunner(self._machine, pod, self._folder / metadata["uid"])
            self._pods[metadata["uid"]] = runner
            self._by_name[metadata["namespace"], metadata["name"]] = runner
            runner.start()
        if "deletionTimestamp" in metadata:
            runner.delete(float(metadata.get("deletionGracePeriodSeconds") or 0))

    def _register(self, name: str, num_gpus: int, log_port: int) -> None:
        api = self._machine.api
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux"}
        resources = {"cpu": "64", "memory": "512Gi", "ephemeral-storage": "1Ti", "pods": "110"}
        taints = []
        if num_gpus:
            labels["nvidia.com/gpu.present"] = "true"
            resources["nvidia.com/gpu"] = str(num_gpus)
            taints = [{"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}]
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": labels},
            "spec": {"taints": taints},
        }
        with contextlib.suppress(ApiError):
            api.create("/api/v1/nodes", node)
        status = {
            "capacity": resources,
            "allocatable": resources,
            "conditions": [
                {
                    "type": "Ready",
                    "status": "True",
                    "reason": "KubeletReady",
                    "lastHeartbeatTime": now(),
                    "lastTransitionTime": now(),
                }
            ],
            "addresses": [{"type": "InternalIP", "address": NODE}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": log_port}},
        }
        api.patch(f"/api/v1/nodes/{name}/status", {"status": status}, MERGE)
        # Admission adds a taint to every new node until a controller sees it ready.
        api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": taints}}, MERGE)


def serve_logs(kubelet: Kubelet, folder: Path) -> int:
    """Answer `kubectl logs`, which the API server passes on; returns the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/").split("/")
            found = kubelet.log(*path[1:4]) if len(path) == 4 and path[0] == "containerLogs" else ""
            content = found.encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    certificate = trustme.CA().issue_cert(NODE)
    file = folder / "kubelet.pem"
    certificate.private_key_and_cert_chain_pem.write_to_path(str(file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(str(file))
    server = http.server.ThreadingHTTPServer((NODE, 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])


def machine_root(folder: Path) -> Path:
    """This machine's files, readable to every user, with writes kept apart in memory."""
    memory, root = folder / "memory", folder / "root"
    memory.mkdir()
    root.mkdir()
    _mount("-t", "tmpfs", "tmpfs", str(memory))
    (memory / "upper").mkdir()
    (memory / "work").mkdir()
    options = f"lowerdir=/,upperdir={memory}/upper,workdir={memory}/work"
    _mount("-t", "overlay", "overlay", "-o", options, str(root))
    # A Python below a home folder is found by user 65532, too.
    for path in map(Path, (sys.base_prefix, *filter(os.path.isabs, sys.path))):
        for parent in (path, *path.parents):
            there = root / parent.relative_to("/")
            if there.is_dir():
                there.chmod(there.stat().st_mode | 0o055)
    return root


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


async def _serve(kubelet: Kubelet, network: Network, log_port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await network.start()
    threading.Thread(target=kubelet.follow, daemon=True).start()
    for shown in (("secret", "secrets"), ("configMap", "configmaps")):
        threading.Thread(target=kubelet.refresh, args=shown, daemon=True).start()
    following = asyncio.create_task(_follow(network))
    await asyncio.to_thread(kubelet.register, log_port)
    await stop.wait()
    following.cancel()


async def _follow(network: Network) -> None:
    while True:
        try:
            await network.follow()
        except (ApiError, OSError) as error:
            logger.warning("network: %s", error)
            await asyncio.sleep(_RETRY_S)


@click.command()
@click.option("--server", required=True, help="host:port of the API server.")
@click.option("--token-file", type=Path, required=True)
@click.option("--ca-file", type=Path, required=True)
@click.option("--folder", type=Path, required=True, help="For files of pods; must be empty.")
@click.option("--node", "nodes", multiple=True, help="NAME=GPUS, several times.")
@click.option("--replaced", default="{}", help="JSON: other entrypoints, by service.")
def main(
    server: str,
    token_file: Path,
    ca_file: Path,
    folder: Path,
    nodes: tuple[str, ...],
    replaced: str,
) -> None:
    """Run pods until SIGTERM."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s")
    logger.info("pid %d", os.getpid())
    api = Api(server, token_file.read_text(), ca_file)
    network = Network(api)
    images = Images(folder, parse_replaced(replaced))
    machine = Machine(api, images, network, machine_root(folder))
    num_gpus = dict(each.split("=") for each in nodes)
    kubelet = Kubelet(machine, {name: int(num) for name, num in num_gpus.items()}, folder / "pods")
    try:
        asyncio.run(_serve(kubelet, network, serve_logs(kubelet, folder)))
    finally:
        kubelet.close()


if __name__ == "__main__":
    main()
