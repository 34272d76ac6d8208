"""The pool for operators: its state, audits of all workers, and changes to one."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Sequence

from headrace.service.errors import ServiceError, invalid, not_found
from headrace.service.protocol import WORKER_ROLE
from headrace.service.versions import version
from headrace.status.store import StatusStore
from headrace.v1 import common_pb2, inference_pb2
from router.core.global_queue import GlobalQueue
from router.passage import Load, merged
from router.request import ClientCompletion
from router.router import Router
from router.rpc.explained import tenant_load
from router.rpc.scheduler_client import SchedulerClient

# An error goes into the headers of an answer, which must not be long.
_MAX_NAMES = 30
_MAX_TENANTS = 100


def queued_by_tenant(queue: GlobalQueue[ClientCompletion]) -> list[inference_pb2.TenantLoad]:
    """What waits in the router over all models, the most tokens first."""
    num_requests: Counter[str] = Counter()
    num_tokens: Counter[str] = Counter()
    for _, waiting in queue.by_model:
        for tenant, load in waiting.load_by_tenant.items():
            num_requests[tenant] += load.num_requests
            num_tokens[tenant] += load.num_tokens
    loads = [Load(name, num_requests[name], count) for name, count in num_tokens.most_common()]
    kept = loads if len(loads) <= _MAX_TENANTS else loads[: _MAX_TENANTS - 1]
    return [tenant_load(load) for load in (*kept, *merged(loads[len(kept) :]))]


def pool(
    router: Router, schedulers: Sequence[SchedulerClient], status: StatusStore
) -> inference_pb2.GetPoolResponse:
    """The workers as their schedulers last reported them, and this router."""
    workers = itertools.chain.from_iterable(scheduler.workers for scheduler in schedulers)
    return inference_pb2.GetPoolResponse(
        workers=sorted(workers, key=lambda worker: worker.worker_id),
        num_queued=router.num_queued,
        num_in_flight=router.num_in_flight,
        num_paused=router.num_paused,
        version=version(),
        time_unix_s=time.time(),
        schedulers=[scheduler.link() for scheduler in schedulers],
        has_store=status.is_configured,
        is_store_up=status.is_durable,
        durations=[
            inference_pb2.DurationCounts(
                metric=metric.name, model=model, bounds_s=metric.bounds, counts=found.counts
            )
            for metric, model, found in router.meters.durations()
        ],
        queued_by_tenant=queued_by_tenant(router.queue),
    )


async def audits(schedulers: Iterable[SchedulerClient]) -> inference_pb2.AuditPoolResponse:
    """The audits of all schedulers; one that gives none is a fault too."""
    found = await asyncio.gather(*map(_audit, schedulers))
    workers = sorted(itertools.chain.from_iterable(found), key=lambda w: w.worker_id)
    return inference_pb2.AuditPoolResponse(workers=workers)


async def update_worker(
    schedulers: Sequence[SchedulerClient], request: inference_pb2.UpdateWorkerRequest
) -> inference_pb2.UpdateWorkerResponse:
    """Have every scheduler that knows the worker change it; routers learn of it by reports.

    Raises:
        ServiceError: no scheduler knows the worker, or one of them refuses.
    """
    if request.role and WORKER_ROLE.word(request.role, None) is None:
        raise invalid("role", "must be MIXED, PREFILL or DECODE")
    if not request.role and not request.HasField("drained"):
        raise invalid("drained", "must be set where no role is")
    name = request.worker_id
    having = [s for s in schedulers if name in {worker.worker_id for worker in s.workers}]
    if not having:
        known = sorted({worker.worker_id for s in schedulers for worker in s.workers})
        more = f" and {len(known) - _MAX_NAMES} more" if len(known) > _MAX_NAMES else ""
        there = ", ".join(known[:_MAX_NAMES]) + more if known else "none"
        text = f"worker_id: there is no worker {name!r}; there are: {there}"
        raise not_found("UNKNOWN_WORKER", text)
    answers = await asyncio.gather(*(scheduler.update_worker(request) for scheduler in having))
    # Of two schedulers one drives the worker, and the other has lost it.
    return min(answers, key=lambda answer: answer.worker.state == common_pb2.WORKER_STATE_LOST)


async def _audit(scheduler: SchedulerClient) -> Sequence[common_pb2.WorkerAudit]:
    try:
        return await scheduler.audit()
    except ServiceError as error:
        fault = f"scheduler {scheduler.name} gave no account: {error.message}"
        return [common_pb2.WorkerAudit(scheduler_id=scheduler.name, faults=[fault])]
