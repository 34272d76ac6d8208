"""What must hold at the end: nothing lives, no block is owned, no key is kept for ever."""

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc.aio

from headrace.service.errors import from_rpc_error
from headrace.status.states import State
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.chaos.cluster import ROUTERS, Cluster
from tests.chaos.received import Received
from tests.headrace.waiting import eventually

_POLL_S = 0.2

Check = Callable[[], Awaitable[list[str]]]

_STATES_BY_REASON = {
    common_pb2.FINISH_REASON_STOP: {State.STOPPED},
    common_pb2.FINISH_REASON_LENGTH: {State.LENGTH_CAPPED},
    common_pb2.FINISH_REASON_ABORTED: {State.ABORTED},
    # EXPIRED: while the request waited in a router.
    common_pb2.FINISH_REASON_DEADLINE: {State.DEADLINE, State.EXPIRED},
}


async def final_faults(
    cluster: Cluster,
    ended: Mapping[str, Received],
    *,
    is_store_exact: bool,
    patience_s: float,
    of: str = "",
) -> list[str]:
    """What is wrong with the cluster, and with the store, after the last request.

    Args:
        cluster: whole again.
        ended: what clients received, by request.
        is_store_exact: no store was killed, so that every record is there.
        patience_s: how long each check may take to become true.
        of: whose keys in the store are looked at: of all requests, or whose ids begin so.
    """
    faults = await _settled(patience_s, lambda: _pool_faults(cluster))
    faults += await _settled(patience_s, lambda: _audit_faults(cluster))
    faults += await _settled(patience_s, lambda: _store_faults(cluster, ended, is_store_exact, of))
    return faults


async def _settled(patience_s: float, check: Check) -> list[str]:
    """The faults that are left when patience ends."""
    faults: list[str] = []

    async def is_settled() -> bool:
        faults[:] = await check()
        return not faults

    with contextlib.suppress(TimeoutError):
        await eventually(is_settled, patience_s, poll_s=_POLL_S)
    return faults


async def _pool_faults(cluster: Cluster) -> list[str]:
    """Requests that routers or schedulers still count, and blocks that are not free."""
    faults = []
    for router in ROUTERS:
        pool = await _ask(cluster, router, "GetPool", inference_pb2.GetPoolRequest())
        if isinstance(pool, str):
            faults.append(pool)
            continue
        counts = (pool.num_queued, pool.num_in_flight, pool.num_paused)
        if any(counts):
            faults.append(f"{router} still counts (queued, in flight, paused) {counts}")
        ready = [w for w in pool.workers if w.state == common_pb2.WORKER_STATE_READY]
        if len(ready) != len(cluster.workers):
            faults.append(f"{router} sees {len(ready)} ready workers")
        for worker in ready:
            if worker.num_running or worker.num_waiting:
                faults.append(f"{worker.worker_id} runs {worker.num_running}+{worker.num_waiting}")
            if worker.num_free_kv_blocks != worker.num_kv_blocks:
                faults.append(f"{worker.worker_id}: {worker.num_free_kv_blocks} blocks are free")
    return faults


async def _audit_faults(cluster: Cluster) -> list[str]:
    """What the ledgers of all workers say."""
    faults = []
    for router in ROUTERS:
        answer = await _ask(cluster, router, "AuditPool", inference_pb2.AuditPoolRequest())
        if isinstance(answer, str):
            faults.append(answer)
            continue
        if len(answer.workers) != len(cluster.workers):
            faults.append(f"{router} audits {len(answer.workers)} workers")
        for audit in answer.workers:
            faults += [f"{audit.worker_id}: {fault}" for fault in audit.faults]
            if audit.num_owned_blocks or audit.num_requests:
                faults.append(f"{audit.worker_id}: {audit.num_owned_blocks} blocks are owned")
    return faults


async def _ask(cluster: Cluster, router: str, method: str, request: Any) -> Any:
    """The answer, or what went wrong."""
    async with grpc.aio.insecure_channel(cluster.address(router)) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        try:
            return await getattr(stub, method)(request, timeout=10)
        except grpc.aio.AioRpcError as error:
            return f"{router} answers {method} with {from_rpc_error(error)!r}"


async def _store_faults(
    cluster: Cluster, ended: Mapping[str, Received], is_store_exact: bool, of: str
) -> list[str]:
    """Keys without TTL, records that are not final, and records that say other than the client."""
    keys = await cluster.store.read_all(f"*:{{{of}*" if of else "*")
    faults = [f"{key} has no TTL" for key, (ttl_ms, _) in keys.items() if ttl_ms < 0]
    records: dict[str, Mapping[str, str]] = {}
    for key, (_, value) in keys.items():
        name = key.split(":", 2)[2]
        request, _, kind = name.rpartition(":")
        # A value that is None went while the keys were read.
        if kind.startswith("status") and value:
            index = int(kind.partition("#")[2] or 0)
            records[f"{request.strip('{}')}#{index}"] = value
    # A replica that becomes the master may lack the last writes of the one that died.
    if is_store_exact or cluster.shape.store != "sentinel":
        faults += [
            f"{name} stays {record['state']}"
            for name, record in records.items()
            if not State(record["state"]).is_final
        ]
    if is_store_exact:
        faults += _differences(ended, records)
    return faults


async def num_stale_hints(cluster: Cluster) -> int:
    """Entries of the sets of live requests: hints that the next reader of a set would remove."""
    keys = await cluster.store.read_all()
    return sum(len(value) for key, (_, value) in keys.items() if "{live:" in key and value)


def _differences(
    ended: Mapping[str, Received], records: Mapping[str, Mapping[str, str]]
) -> Sequence[str]:
    found = []
    for request_id, received in ended.items():
        for index, reason in enumerate(received.finish_reasons):
            record = records.get(f"{request_id}#{index}")
            state = record["state"] if record else "unknown"
            states = _STATES_BY_REASON.get(reason, set())
            if reason == common_pb2.FINISH_REASON_STOP and received.wanted.request.sampling.stop:
                # The scheduler may have run ahead to max_tokens when the router finds the stop.
                states = states | {State.LENGTH_CAPPED}
            if state not in states:
                name = common_pb2.FinishReason.Name(reason)
                found.append(f"{request_id}#{index} ended as {name}, its record is {state}")
    return found
