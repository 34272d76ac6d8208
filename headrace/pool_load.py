"""What pools of workers on Kubernetes measure, as all routers together see them."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Self

from headrace.client import HeadraceClient
from headrace.connections import UnreachableError
from headrace.durations import RecentDurations
from headrace.kubernetes.sizing import Measured
from headrace.service.channels import ChannelConfig
from headrace.service.errors import ServiceError
from headrace.types import PoolInfo, WorkerStatus

_WINDOW_S = 60.0
_SHARE = 0.95
# Less than what keeps the leader from renewing its lease.
_ASK_TIMEOUT_S = 3.0
_QUEUE_WAIT = "headrace.queue.time"
_TTFT = "gen_ai.server.time_to_first_token"
_TPOT = "gen_ai.server.time_per_output_token"


class PoolLoad:
    """Asks every router, again and again; owns a client for each.

    A name that stands for several addresses, as a headless Service's does, is every one of them.
    """

    def __init__(self, target: str, config: ChannelConfig, pools: Sequence[str]) -> None:
        """target: "host:port", or several separated by commas. pools: names of StatefulSets."""
        # For each name the addresses that were found last, and the host that each certifies.
        self._hosts_by_name: dict[str, Sequence[tuple[str, str]]] = {
            name.strip(): () for name in target.split(",")
        }
        self._config = config
        self._pools = pools
        self._clients: dict[str, HeadraceClient] = {}
        self._recent = RecentDurations(_WINDOW_S)
        self._num_ready = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self._clients.values():
            await client.aclose()

    async def measure(self) -> Mapping[str, Measured]:
        """Each pool by its name.

        Raises:
            OSError: no router answers.
        """
        await self._find_routers()
        clients = dict(self._clients)
        answers = await asyncio.gather(*map(_ask, clients.values()))
        now_s = asyncio.get_running_loop().time()
        infos = []
        for router, answer in zip(clients, answers, strict=True):
            if isinstance(answer, PoolInfo):
                infos.append(answer)
                self._recent.add(router, answer.durations, now_s)
        if (num_ready := max(map(_num_ready, infos), default=0)) != self._num_ready:
            # What other workers took says nothing of these.
            self._num_ready = num_ready
            self._recent.clear()
        if not infos:
            why = str(answers[0]) or "no answer in time" if answers else "its name has no address"
            raise OSError(f"no router says what the pools do: {why}")
        return measured(infos, self._pools, self._recent)

    async def set_role(self, worker_id: str, role: str) -> None:
        """Give a worker a role; OSError if no router does."""
        errors = []
        for client in self._clients.values():
            try:
                await client.set_role(worker_id, role)
            except ServiceError as error:
                errors.append(error)
            else:
                return
        # What a router says explains more than that another one is away.
        errors.sort(key=lambda error: isinstance(error, UnreachableError))
        why = errors[0] if errors else "no router is known"
        raise OSError(f"{worker_id} does not become {role}: {why}")

    async def _find_routers(self) -> None:
        """Open a client for each new address, and close those of addresses that have gone."""
        for name in self._hosts_by_name:
            if found := await _look_up(name):
                self._hosts_by_name[name] = found
        hosts = {address: host for of in self._hosts_by_name.values() for address, host in of}
        for gone in self._clients.keys() - hosts.keys():
            await self._clients.pop(gone).aclose()
        for address, host in hosts.items():
            if address not in self._clients:
                self._clients[address] = HeadraceClient(address, self._config, tls_name=host)


async def _ask(client: HeadraceClient) -> PoolInfo | Exception:
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return await client.pool()
    except (ServiceError, TimeoutError) as error:
        return error


async def _look_up(name: str) -> Sequence[tuple[str, str]]:
    """The addresses behind "host:port", each with the host; none if the look-up fails.

    A name of one address stands for itself, with "" as the host.
    """
    if name.startswith("unix:"):
        return [(name, "")]
    host, _, port = name.rpartition(":")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )
    except OSError:
        return []
    # A router with an address of each family is one router.
    first = min(info[0] for info in infos)
    found = sorted({str(info[4][0]) for info in infos if info[0] == first})
    if len(found) == 1:
        return [(name, "")]
    return [(f"[{one}]:{port}" if ":" in one else f"{one}:{port}", host) for one in found]


def measured(
    infos: Sequence[PoolInfo], pools: Sequence[str], recent: RecentDurations
) -> dict[str, Measured]:
    """What each pool measures, whose workers are named like its pods.

    What waits in the routers waits for any worker, so each pool gets a share by its ready workers.
    Latencies are of all pools together.

    Args:
        infos: the answer of each router; at least one.
        pools: names of StatefulSets.
        recent: durations of the last minute.
    """
    # Routers that have just started do not see all schedulers yet.
    workers = max(infos, key=_num_ready).workers
    num_queued = sum(info.num_queued for info in infos)
    ready = {
        name: [w for w in workers if w.state == "ready" and _is_of(w.worker_id, name)]
        for name in pools
    }
    num_ready = sum(map(len, ready.values()))
    result = {}
    for name, mine in ready.items():
        num_blocks = sum(worker.num_kv_blocks for worker in mine)
        num_free = sum(worker.num_free_kv_blocks for worker in mine)
        result[name] = Measured(
            num_ready=len(mine),
            kv_use=1 - num_free / num_blocks if num_blocks else 0.0,
            num_queued=round(num_queued * len(mine) / num_ready) if num_ready else num_queued,
            queue_wait_s=recent.percentile_s(_QUEUE_WAIT, _SHARE),
            ttft_s=recent.percentile_s(_TTFT, _SHARE),
            tpot_s=recent.percentile_s(_TPOT, _SHARE),
            prefill=_of_role(mine, "prefill"),
            decode=_of_role(mine, "decode"),
        )
    return result


def _num_ready(info: PoolInfo) -> int:
    return sum(worker.state == "ready" for worker in info.workers)


def _of_role(workers: Sequence[WorkerStatus], role: str) -> tuple[str, ...]:
    mine = [worker for worker in workers if worker.role == role]
    mine.sort(key=lambda worker: (worker.num_running + worker.num_waiting, worker.worker_id))
    return tuple(worker.worker_id for worker in mine)


def _is_of(worker_id: str, pool: str) -> bool:
    """Whether a worker is a pod of the pool's StatefulSet."""
    name, _, ordinal = worker_id.rpartition("-")
    return name == pool and ordinal.isdigit()
