"""The Scheduler service: a stream per router, snapshots of the pool, explanations of requests."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from headrace.service.errors import (
    ServiceError,
    exhausted,
    invalid,
    not_found,
    unavailable,
)
from headrace.service.handlers import write
from headrace.service.protocol import WORKER_ROLE
from headrace.service.versions import check_peer
from headrace.v1 import inference_pb2, scheduler_pb2, scheduler_pb2_grpc, steps_pb2
from headrace.vocabulary import RefusalReason
from scheduler.aborts import abort
from scheduler.connection import RouterConnection
from scheduler.orphans import Orphans
from scheduler.outbox import OutboxClosedError
from scheduler.pool import Pool
from scheduler.rpc import explain_wire, wire
from scheduler.rpc.audit import audit_response
from scheduler.rpc.steps import step_batch, waiting_requests, watch_steps
from scheduler.switchboard import Switchboard
from scheduler.updates import NotTaken

FULL_NAME = "headrace.v1.Scheduler"

_SNAPSHOT_INTERVAL_S = 0.1
_SNAPSHOT_HEARTBEAT_S = 1.0
# A worker that does not give its rows by then is audited without them.
_AUDIT_PATIENCE_S = 3.0

Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """gRPC methods of the scheduler; keeps no state of a request."""

    def __init__(
        self,
        scheduler_id: str,
        switchboard: Switchboard,
        pool: Pool,
        orphans: Orphans,
        *,
        max_waiting_tokens: int,
    ) -> None:
        self._scheduler_id = scheduler_id
        self._switchboard = switchboard
        self._pool = pool
        self._orphans = orphans
        self._max_waiting_tokens = max_waiting_tokens
        self._connections: set[RouterConnection] = set()
        self._is_closing = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serve it there."""
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, server)

    def close_streams(self) -> None:
        """Send what waits, then end every stream; routers submit what is unfinished elsewhere."""
        self._is_closing = True
        self._switchboard.changes.notify()
        for connection in self._connections:
            connection.finish()

    async def Connect(  # type: ignore[override]  # grpc.aio takes handlers that write, too
        self, request_iterator: AsyncIterator[scheduler_pb2.RouterMessage], context: Context
    ) -> None:
        """Serve one router until the router leaves or is too slow, or this scheduler stops."""
        messages = aiter(request_iterator)
        hello = await anext(messages, None)
        if hello is None or not hello.HasField("hello"):
            raise invalid("hello", "must be in the first message of the stream")
        wire.check_router_id(hello.hello.router_id)
        check_peer(f"router {hello.hello.router_id}", hello.hello.version, "this scheduler")
        if self._is_closing:
            raise _drained()
        connection = RouterConnection(
            hello.hello.router_id,
            self._switchboard,
            self._pool,
            self._orphans,
            max_waiting_tokens=self._max_waiting_tokens,
        )
        self._connections.add(connection)
        try:
            # Not with the first message: a stream that ends in the middle of that would send them
            # again with its status, which gRPC refuses, and the router would never hear its end.
            await context.send_initial_metadata(())
            async with asyncio.TaskGroup() as tasks:
                others = [
                    tasks.create_task(_write_news(connection, context)),
                    tasks.create_task(_fail_when_too_slow(connection)),
                ]
                _read(connection, hello)
                async for message in messages:
                    _read(connection, message)
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _what_to_tell(group) from group
        finally:
            self._connections.remove(connection)
            connection.close()

    async def WatchPool(
        self, _request: scheduler_pb2.WatchPoolRequest, _context: Context
    ) -> AsyncIterator[scheduler_pb2.PoolSnapshot]:
        """Snapshots of the pool: one now, and one after each change."""
        changes = self._switchboard.changes
        while not self._is_closing:
            num_changes = changes.num_changes
            yield wire.pool_snapshot(
                self._scheduler_id, self._pool.snapshot(), is_draining=self._pool.is_draining
            )
            await asyncio.sleep(_SNAPSHOT_INTERVAL_S)
            await changes.wait(num_changes, _SNAPSHOT_HEARTBEAT_S - _SNAPSHOT_INTERVAL_S)

    async def Explain(
        self, request: inference_pb2.ExplainRequest, _context: Context
    ) -> inference_pb2.ExplainResponse:
        """A request's history, while the request lives and for a while after."""
        explanation = self._pool.explain(request.request_id)
        if explanation is None:
            raise not_found(
                "UNKNOWN_REQUEST", f"no request {request.request_id!r} is here or ended lately"
            )
        return explain_wire.explain_response(explanation)

    async def Abort(
        self, request: inference_pb2.AbortRequest, _context: Context
    ) -> inference_pb2.AbortResponse:
        """End requests of any router: those that live here, and those in the routers' queues."""
        request_ids = wire.ids_to_abort(request)
        return wire.abort_response(request_ids, abort(self._switchboard, request_ids))

    async def Audit(
        self, _request: inference_pb2.AuditPoolRequest, _context: Context
    ) -> inference_pb2.AuditPoolResponse:
        """Walk the KV ledger of every worker that is here; see `scheduler.audit`."""
        audits = await asyncio.gather(
            *(engine.audit(_AUDIT_PATIENCE_S) for engine in self._pool.engines)
        )
        return audit_response(self._scheduler_id, [a for a in audits if a is not None])

    async def UpdateWorker(
        self, request: inference_pb2.UpdateWorkerRequest, _context: Context
    ) -> inference_pb2.UpdateWorkerResponse:
        """Do with a worker as an operator says."""
        load = self._pool.update(
            request.worker_id,
            is_drained=request.drained if request.HasField("drained") else None,
            role=WORKER_ROLE.word(request.role, None),
        )
        if load is None:
            known = ", ".join(load.info.worker_id for load in self._pool.snapshot()) or "none"
            raise not_found("UNKNOWN_WORKER", f"no worker {request.worker_id!r} is here: {known}")
        return inference_pb2.UpdateWorkerResponse(worker=wire.worker_message(load))

    async def WatchSteps(
        self, request: steps_pb2.WatchStepsRequest, _context: Context
    ) -> AsyncIterator[steps_pb2.WatchStepsResponse]:
        """The workers' steps, kept ones first."""
        steps = watch_steps(self._scheduler_id, self._pool, request, lambda: self._is_closing)
        async for response in steps:
            yield response

    async def GetStepBatch(
        self, request: steps_pb2.GetStepBatchRequest, _context: Context
    ) -> steps_pb2.GetStepBatchResponse:
        """The requests of one of a worker's latest steps."""
        return step_batch(self._pool, request.worker_id, request.position)

    async def ListWaiting(
        self, request: steps_pb2.ListWaitingRequest, _context: Context
    ) -> steps_pb2.ListWaitingResponse:
        """The first requests that wait here."""
        return waiting_requests(self._pool, request.limit)


async def _write_news(connection: RouterConnection, context: Context) -> None:
    try:
        while True:
            await write(context, wire.scheduler_message(await connection.take()))
    except OutboxClosedError:
        raise _drained() from None


async def _fail_when_too_slow(connection: RouterConnection) -> None:
    await connection.wait_overflow()
    raise exhausted(
        "ROUTER_TOO_SLOW", "the router reads slower than its tokens come; they were dropped"
    )


def _drained() -> ServiceError:
    return unavailable("DRAINED", "this scheduler has shut down; use another")


def _read(connection: RouterConnection, message: scheduler_pb2.RouterMessage) -> None:
    for submission in message.submissions:
        try:
            connection.submit(wire.submission_of(submission))
        except ServiceError as error:
            connection.refuse(
                NotTaken(submission.handle, RefusalReason.INVALID, error.message, error.field or "")
            )
    for pause in message.pauses:
        connection.set_paused(pause.handle, is_paused=pause.paused)
    for handle in message.released:
        connection.release(handle)
    for cancellation in message.cancellations:
        status = wire.status_of_cancellation(cancellation)
        connection.cancel(cancellation.handle, status, cancellation.detail)


def _what_to_tell(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The ServiceError in a group, else the group."""
    return next((error for error in group.exceptions if isinstance(error, ServiceError)), group)
