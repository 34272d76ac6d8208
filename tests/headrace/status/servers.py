"""Real stores of several servers: a master with a replica and Sentinels, and a cluster."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import redis.asyncio
from redis.exceptions import RedisError

from headrace.status.embedded import find_server
from tests.headrace.ports import HOST, free_ports
from tests.headrace.waiting import eventually


class Server:
    """A server process; killed, if need be, by its owner."""

    def __init__(self, port: int, folder: Path, arguments: Sequence[str]) -> None:
        self.port = port
        self._folder = folder
        self._arguments = arguments
        self.process: asyncio.subprocess.Process | None = None

    def client(self, **options) -> redis.asyncio.Redis:
        return redis.asyncio.Redis(host=HOST, port=self.port, decode_responses=True, **options)

    async def start(self) -> None:
        """Starts the process, again if it ended, and waits until it answers."""
        self._folder.mkdir(exist_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            *(str(find_server()), *self._arguments),
            *("--port", str(self.port), "--bind", HOST, "--dir", str(self._folder)),
            stdout=asyncio.subprocess.DEVNULL,
        )
        async with self.client() as client:

            async def answers() -> bool:
                with contextlib.suppress(RedisError, OSError):
                    return bool(await client.ping())
                return False

            await eventually(answers)

    async def stop(self) -> None:
        """Kills the process, even if it is suspended."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class SentinelStore:
    """A master, its replica, and the Sentinels that watch them."""

    def __init__(self, folder: Path, *, num_sentinels: int = 3) -> None:
        ports = free_ports(2 + num_sentinels)
        self.servers = [
            Server(ports[0], folder / "a", ("--save", "")),
            Server(ports[1], folder / "b", ("--save", "", "--replicaof", f"{HOST} {ports[0]}")),
        ]
        self.sentinels = [
            Server(
                port,
                folder / f"sentinel-{port}",
                (_sentinel_file(folder, port, ports[0]), "--sentinel"),
            )
            for port in ports[2:]
        ]

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/headrace"

    async def master_port(self) -> int:
        """The port of the master, as a Sentinel says."""
        async with self.sentinels[0].client() as client:
            _, port = await client.sentinel_get_master_addr_by_name("headrace")
        return int(port)

    async def is_whole(self) -> bool:
        """Whether the Sentinels know each other and the replica, and the replica is in step."""
        for sentinel in self.sentinels:
            async with sentinel.client() as client:
                state = await client.sentinel_master("headrace")
                replicas = await client.sentinel_slaves("headrace")
            if state["num-other-sentinels"] < len(self.sentinels) - 1 or not replicas:
                return False
        async with self.servers[1].client() as client:
            info = await client.info("replication")
        return info["master_link_status"] == "up"


def _sentinel_file(folder: Path, port: int, master_port: int) -> str:
    file = folder / f"sentinel-{port}.conf"
    file.write_text(
        f"sentinel monitor headrace {HOST} {master_port} 2\n"
        "sentinel down-after-milliseconds headrace 1000\n"
        "sentinel failover-timeout headrace 5000\n"
    )
    return str(file)


@asynccontextmanager
async def sentinel_store(folder: Path) -> AsyncIterator[SentinelStore]:
    """A running master with replica and three Sentinels."""
    store = SentinelStore(folder)
    try:
        for server in (*store.servers, *store.sentinels):
            await server.start()
        await eventually(store.is_whole)
        yield store
    finally:
        for server in (*store.sentinels, *store.servers):
            await server.stop()


class ClusterStore:
    """Nodes of a cluster, without replicas."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        ports = free_ports(2 * num_nodes)
        self.nodes = [
            Server(
                port,
                folder / f"node-{port}",
                ("--save", "", "--cluster-enabled", "yes", "--cluster-port", str(bus_port)),
            )
            for port, bus_port in zip(ports[:num_nodes], ports[num_nodes:], strict=True)
        ]
        self._bus_ports = ports[num_nodes:]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"{HOST}:{node.port}" for node in self.nodes)

    async def form(self) -> None:
        """Divides the slots and waits until all nodes agree."""
        step = -(-16384 // len(self.nodes))
        first = self.nodes[0]
        for index, node in enumerate(self.nodes):
            async with node.client() as client:
                last = min((index + 1) * step, 16384) - 1
                await client.execute_command("CLUSTER ADDSLOTSRANGE", index * step, last)
                meet = ("CLUSTER MEET", HOST, first.port, self._bus_ports[0])
                await client.execute_command(*meet)
        for node in self.nodes:
            async with node.client() as client:

                async def agrees(client=client) -> bool:
                    info = await client.cluster("INFO")
                    return (info["cluster_state"], int(info["cluster_known_nodes"])) == (
                        "ok",
                        len(self.nodes),
                    )

                await eventually(agrees)


@asynccontextmanager
async def cluster_store(folder: Path, num_nodes: int = 3) -> AsyncIterator[ClusterStore]:
    """A running cluster that has every slot."""
    store = ClusterStore(folder, num_nodes)
    try:
        for node in store.nodes:
            await node.start()
        await store.form()
        yield store
    finally:
        for node in store.nodes:
            await node.stop()
