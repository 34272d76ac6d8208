"""Services of the cluster: their names, and a proxy at each Service's own address.

Pods have addresses in 127.N.0.0/16, Services in 127.2.0.0/16, so nothing leaves this machine. Who
is behind a name follows from selectors and readiness, as in a cluster; but not through Endpoints,
because the API server takes none on loopback.
"""

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.cluster.api import Api, Object
from tests.cluster.dns import DnsServer

_FIRST_N, _LAST_N = 16, 254
DOMAIN = "cluster.local"
NODE = "127.0.0.1"  # address of every node
_POLL_S = 0.1
_PIECE_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Backed:
    """A Service and the pods that its name stands for now."""

    service: Object
    pods: Sequence[Object]

    @property
    def address(self) -> str:
        """The Service's own address; empty for a headless one."""
        address = self.service["spec"].get("clusterIP", "")
        return "" if address == "None" else str(address)

    def names(self) -> dict[str, Sequence[str]]:
        """Addresses by name."""
        metadata = self.service["metadata"]
        name = f"{metadata['name']}.{metadata['namespace']}.svc.{DOMAIN}"
        if self.address:
            return {name: [self.address]}
        found: dict[str, Sequence[str]] = {name: [pod["status"]["podIP"] for pod in self.pods]}
        for pod in self.pods:
            if pod["spec"].get("subdomain") == metadata["name"]:
                found[f"{pod['spec']['hostname']}.{name}"] = [pod["status"]["podIP"]]
        return found

    def targets(self, port: Object) -> list[tuple[str, int]]:
        """Where connections to a port of the Service go."""
        return [(pod["status"]["podIP"], _port(pod, port["targetPort"])) for pod in self.pods]


def backed(services: Sequence[Object], pods: Sequence[Object]) -> list[Backed]:
    """Each Service with a selector, and its pods."""
    found = []
    for service in services:
        spec = service["spec"]
        if spec.get("selector"):
            everyone = spec.get("publishNotReadyAddresses", False)
            chosen = [pod for pod in pods if _is_behind(pod, service, everyone)]
            found.append(Backed(service, chosen))
    return found


def _is_behind(pod: Object, service: Object, is_everyone: bool) -> bool:
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    if pod["metadata"]["namespace"] != service["metadata"]["namespace"]:
        return False
    if not service["spec"]["selector"].items() <= labels.items() or not status.get("podIP"):
        return False
    if status["phase"] in ("Succeeded", "Failed"):
        return False
    if is_everyone:
        return True
    conditions = {each["type"]: each["status"] for each in status.get("conditions") or []}
    return conditions.get("Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def _port(pod: Object, target: int | str) -> int:
    if isinstance(target, int):
        return target
    ports = [port for each in pod["spec"]["containers"] for port in each.get("ports") or []]
    return next(int(port["containerPort"]) for port in ports if port.get("name") == target)


class Network:
    """Follows Services and pods."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._dns = DnsServer()
        self._n = 0
        self._num_pods = 0
        self._targets: dict[tuple[str, int], list[tuple[str, int]]] = {}
        self._servers: dict[tuple[str, int], asyncio.Server] = {}

    @property
    def name_server(self) -> str:
        """Where questions about names are answered."""
        return f"127.{self._n}.0.10"

    def new_pod_ip(self) -> str:
        """An address that no pod has had."""
        self._num_pods += 1
        return f"127.{self._n}.{1 + self._num_pods // 250}.{1 + self._num_pods % 250}"

    async def start(self) -> None:
        """Listen for questions about names, where no other cluster does."""
        loop = asyncio.get_running_loop()
        for n in random.sample(range(_FIRST_N, _LAST_N), 20):
            self._n = n
            with contextlib.suppress(OSError):
                address = (self.name_server, 53)
                await loop.create_datagram_endpoint(lambda: self._dns, local_addr=address)
                return
        raise OSError("no address is free for a name server")

    async def follow(self) -> None:
        """Until cancelled, or the API server cannot be asked."""
        while True:
            services = await asyncio.to_thread(self._api.items, "/api/v1/services")
            pods = await asyncio.to_thread(self._api.items, "/api/v1/pods")
            found = backed(services, pods)
            self._dns.addresses = {
                name: addresses for each in found for name, addresses in each.names().items()
            }
            await self._listen(found)
            await asyncio.sleep(_POLL_S)

    async def _listen(self, found: Sequence[Backed]) -> None:
        self._targets = {}
        for each in found:
            for port in each.service["spec"]["ports"] if each.address else ():
                self._targets[each.address, port["port"]] = targets = each.targets(port)
                if "nodePort" in port:
                    self._targets[NODE, port["nodePort"]] = targets
        for key in set(self._servers) - set(self._targets):
            self._servers.pop(key).close()
        for key in set(self._targets) - set(self._servers):
            self._servers[key] = await asyncio.start_server(
                lambda reader, writer, key=key: self._forward(key, reader, writer), *key
            )

    async def _forward(
        self, key: tuple[str, int], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        targets = list(self._targets.get(key, []))
        random.shuffle(targets)
        with contextlib.suppress(OSError):
            for target in targets:
                try:
                    far = await asyncio.open_connection(*target)
                except OSError:
                    continue
                await relay(reader, writer, far)
                break
        writer.close()


async def relay(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Pass on what comes, both ways, until both ends are closed."""
    await asyncio.gather(_copy(reader, far[1]), _copy(far[0], writer))
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_PIECE_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()
