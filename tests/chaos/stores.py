"""The status store under test: one Valkey, one with replicas under Sentinel, or a cluster.

One binary is all of them. Data lies in a folder, so that a killed server comes back with its
records.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import redis.asyncio
from redis.exceptions import RedisError

from headrace.service.children import tied_to_us
from headrace.status.embedded import find_server
from tests.headrace.ports import free_ports
from tests.headrace.waiting import eventually

MASTER = "chaos"
_PATIENCE_S = 60.0
_POLL_S = 0.05


class Node:
    """One server process."""

    def __init__(self, name: str, folder: Path, port: int, config: str) -> None:
        self.name = name
        self.port = port
        self._folder = folder / name
        self._folder.mkdir()
        # Servers write to their configuration file: where the master is, who is in the cluster.
        self._config = self._folder / "server.conf"
        self._config.write_text(
            f"port {port}\nbind 127.0.0.1\ndir {self._folder}\ndaemonize no\n" + config
        )
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process and waits until the server answers."""
        command = [str(find_server()), str(self._config)]
        if self.name.startswith("sentinel"):
            command.append("--sentinel")
        with (self._folder / "server.log").open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *tied_to_us(command), stdout=log, stderr=log, start_new_session=True
            )
        async with self.client() as client:
            await eventually(lambda: _answers(client), _PATIENCE_S, poll_s=_POLL_S)

    async def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            async with asyncio.timeout(_PATIENCE_S):
                await self.process.wait()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[redis.asyncio.Redis]:
        client = redis.asyncio.Redis(port=self.port, decode_responses=True, socket_timeout=5)
        try:
            yield client
        finally:
            await client.aclose()


class Store:
    """A store of one server; the base of the others.

    address is where a proxy reaches the server, "" where clients find servers by themselves.
    """

    num_nodes = 1
    config = 'appendonly yes\nappendfsync everysec\nsave ""\n'

    def __init__(self, folder: Path) -> None:
        ports = free_ports(self.num_nodes)
        self.nodes = [Node(f"store{i}", folder, port, self.config) for i, port in enumerate(ports)]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.nodes[0].port}"

    @property
    def url(self) -> str:
        return f"redis://{self.address}/0"

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(node.start() for node in self.nodes))
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in self.nodes:
            await node.kill()

    async def read_all(self, match: str = "*") -> dict[str, tuple[int, Any]]:
        """Every key with its TTL in ms (negative: none) and its value, of hashes and sets only.

        Args:
            match: a pattern of keys.
        """
        found: dict[str, tuple[int, Any]] = {}
        for node in await self.masters():
            async with node.client() as client:
                keys = [key async for key in client.scan_iter(match, count=1000)]
                for i in range(0, len(keys), 100):
                    found |= await _values(client, keys[i : i + 100])
        return found

    async def masters(self) -> list[Node]:
        """The nodes that own keys now."""
        return self.nodes

    async def may_lose_a_node(self) -> bool:
        """Whether what the store has kept survives the death of a node."""
        return True


async def _values(
    client: redis.asyncio.Redis, keys: Sequence[str]
) -> Mapping[str, tuple[int, Any]]:
    """TTL and value of each key; None is a value of another kind, or of a key that has gone."""
    async with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.pttl(key).type(key)
        facts = await pipe.execute()
        ttls, kinds = facts[::2], facts[1::2]
        for key, kind in zip(keys, kinds, strict=True):
            match kind:
                case "hash":
                    pipe.hgetall(key)
                case "set":
                    pipe.smembers(key)
                case _:
                    pipe.echo("")
        values = await pipe.execute()
    return {key: (ttl, value or None) for key, ttl, value in zip(keys, ttls, values, strict=True)}


class SentinelStore(Store):
    """A master and a replica, and three Sentinels that choose another master in half a second."""

    num_nodes = 2
    address = ""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._sentinels = [
            Node(
                f"sentinel{i}",
                folder,
                port,
                f"sentinel monitor {MASTER} 127.0.0.1 {self.nodes[0].port} 2\n"
                f"sentinel down-after-milliseconds {MASTER} 1000\n"
                f"sentinel failover-timeout {MASTER} 5000\n",
            )
            for i, port in enumerate(free_ports(3))
        ]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self._sentinels)
        return f"redis+sentinel://{hosts}/{MASTER}/0"

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        async with self.nodes[1].client() as client:
            await client.replicaof("127.0.0.1", str(self.nodes[0].port))  # type: ignore[no-untyped-call]
        await asyncio.gather(*(node.start() for node in self._sentinels))
        return self

    async def __aexit__(self, *error: object) -> None:
        for node in self._sentinels:
            await node.kill()
        await super().__aexit__(*error)

    async def masters(self) -> list[Node]:
        async with self._sentinels[0].client() as client:
            found = await client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
        return [node for node in self.nodes if node.port == int(found[1])]

    async def may_lose_a_node(self) -> bool:
        """Only while the replica has all that the master has."""
        with contextlib.suppress(RedisError, OSError):
            for node in await self.masters():
                async with node.client() as client:
                    replica = (await client.info("replication")).get("slave0", {})
                    return replica.get("state") == "online" and replica.get("lag", 9) <= 1
        return False


class ClusterStore(Store):
    """Three masters that share the slots."""

    num_nodes = 3
    address = ""
    config = Store.config + (
        "cluster-enabled yes\ncluster-node-timeout 2000\ncluster-require-full-coverage no\n"
    )

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        bounds = [0, 5461, 10923, 16384]
        for i, node in enumerate(self.nodes):
            async with node.client() as client:
                await client.execute_command(
                    "CLUSTER", "ADDSLOTSRANGE", bounds[i], bounds[i + 1] - 1
                )
                for other in self.nodes[:i]:
                    await client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port)
        for node in self.nodes:
            async with node.client() as client:
                await eventually(lambda c=client: _is_whole(c), _PATIENCE_S, poll_s=_POLL_S)  # type: ignore[misc]
        return self


async def _is_whole(client: redis.asyncio.Redis) -> bool:
    info = await client.execute_command("CLUSTER", "INFO")
    values = (
        info
        if isinstance(info, dict)
        else dict(line.split(":") for line in info.split("\r\n") if line)
    )
    return values["cluster_state"] == "ok" and values["cluster_slots_assigned"] == "16384"


async def _answers(client: redis.asyncio.Redis) -> bool:
    try:
        return bool(await client.ping())  # type: ignore[misc]
    except (RedisError, OSError):
        return False


def make_store(kind: str, folder: Path) -> Store:
    """The store that --store names."""
    kinds = {"single": Store, "sentinel": SentinelStore, "cluster": ClusterStore}
    return kinds[kind](folder)
