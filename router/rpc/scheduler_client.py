"""The connection to one scheduler, kept up for as long as the router lives.

While connected, one Connect stream carries every request, and WatchPool reports the workers. When
either stream breaks, both end, the router requeues the scheduler's requests, and the client
connects again. Sending never waits: what is sent while a message is being written, and shortly
after, goes into the next message.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Collection, Sequence
from typing import Any

import grpc.aio

from headrace.service.channels import connect_failure
from headrace.service.errors import ServiceError, from_rpc_error
from headrace.service.versions import VERSION_SKEW, check_peer, version
from headrace.v1 import common_pb2, inference_pb2, scheduler_pb2, scheduler_pb2_grpc, steps_pb2
from router.outputs import CompletionFinish
from router.request import ClientCompletion
from router.router import Router
from router.rpc import scheduler_wire
from router.rpc.outbox import SchedulerOutbox

logger = logging.getLogger(__name__)

_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 5.0
_ASK_TIMEOUT_S = 10.0

# Between two messages; the first is sent at once. A message for each of a thousand requests a
# second would cost router, scheduler and worker more CPU than the requests themselves, and a step
# takes longer anyway.
_MESSAGE_GAP_S = 0.002


class SchedulerClient:
    """A scheduler's link: `run` does the work, the other methods say what to send."""

    def __init__(
        self, name: str, channel: grpc.aio.Channel, router: Router, *, router_id: str
    ) -> None:
        """name is the scheduler's address. The caller closes the channel."""
        self._name = name
        self._stub: Any = scheduler_pb2_grpc.SchedulerStub(channel)
        self._router = router
        self._requests = router.live
        self._router_id = router_id
        self._outbox = SchedulerOutbox()
        self._has_mail = asyncio.Event()
        self._is_up = False
        self._is_leaving = False
        self._is_gone = asyncio.Event()
        self._scheduler_id = ""
        self._error = ""
        self._version = ""
        self._clock_offset_s = 0.0
        self.workers: list[common_pb2.Worker] = []

    @property
    def name(self) -> str:
        """The scheduler's address."""
        return self._name

    @property
    def scheduler_id(self) -> str:
        """The name that the scheduler gives itself; "" until it has reported."""
        return self._scheduler_id

    def link(self) -> inference_pb2.SchedulerLink:
        """The connection, for people."""
        return inference_pb2.SchedulerLink(
            address=self._name,
            scheduler_id=self._scheduler_id,
            connected=self._is_up,
            version=self._version,
            clock_offset_s=self._clock_offset_s,
            error="" if self._is_up else self._error,
        )

    def submit(self, completion: ClientCompletion) -> None:
        """Send a completion to its worker."""
        self._outbox.submit(scheduler_wire.to_submission(completion))
        self._has_mail.set()

    def cancel(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        """Cancel a submitted completion, which ends like this."""
        cancellation = scheduler_wire.to_cancellation(completion.handle, finish)
        self._outbox.cancel(completion.request_id, cancellation)
        self._has_mail.set()

    def set_paused(self, handle: int, *, is_paused: bool) -> None:
        """Pause the completion that was sent under the handle, or let it continue."""
        self._outbox.pause(scheduler_wire.to_pause(handle, is_paused=is_paused))
        self._has_mail.set()

    def release(self, handle: int) -> None:
        """Say that the completion that was sent under the handle goes on elsewhere."""
        self._outbox.release(handle)
        self._has_mail.set()

    async def explain(self, request_id: str) -> inference_pb2.ExplainResponse:
        """The scheduler's account of a request; raises the scheduler's ServiceError."""
        request = inference_pb2.ExplainRequest(request_id=request_id)
        response: inference_pb2.ExplainResponse = await self._ask(self._stub.Explain, request)
        return response

    async def abort(self, request_ids: Sequence[str]) -> Collection[str]:
        """The requests that ended there; raises the scheduler's ServiceError."""
        request = inference_pb2.AbortRequest(request_ids=request_ids)
        response: inference_pb2.AbortResponse = await self._ask(self._stub.Abort, request)
        ended = inference_pb2.AbortOutcome.RESULT_ABORTED
        return {o.request_id for o in response.outcomes if o.result == ended}

    async def audit(self) -> Sequence[common_pb2.WorkerAudit]:
        """The audits of the scheduler's workers; raises the scheduler's ServiceError."""
        request = inference_pb2.AuditPoolRequest()
        response: inference_pb2.AuditPoolResponse = await self._ask(self._stub.Audit, request)
        return response.workers

    async def update_worker(
        self, request: inference_pb2.UpdateWorkerRequest
    ) -> inference_pb2.UpdateWorkerResponse:
        """Change a worker of the scheduler; raises the scheduler's ServiceError."""
        response: inference_pb2.UpdateWorkerResponse = await self._ask(
            self._stub.UpdateWorker, request
        )
        return response

    def watch_steps(self, request: steps_pb2.WatchStepsRequest) -> Any:
        """The call that streams the steps of the scheduler's workers; the caller cancels it."""
        return self._stub.WatchSteps(request)

    async def step_batch(
        self, request: steps_pb2.GetStepBatchRequest
    ) -> steps_pb2.GetStepBatchResponse:
        """The requests of a step; raises the scheduler's ServiceError."""
        response: steps_pb2.GetStepBatchResponse = await self._ask(self._stub.GetStepBatch, request)
        return response

    async def list_waiting(self, limit: int) -> steps_pb2.ListWaitingResponse:
        """The first requests that wait in the scheduler; raises the scheduler's ServiceError."""
        request = steps_pb2.ListWaitingRequest(limit=limit)
        response: steps_pb2.ListWaitingResponse = await self._ask(self._stub.ListWaiting, request)
        return response

    @staticmethod
    async def _ask(method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_ASK_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def run(self) -> None:
        """Stay connected until cancelled, or until a scheduler that has gone is not connected."""
        backoff_s = _FIRST_BACKOFF_S
        while not self._is_gone.is_set():
            was_up = await self._serve_connection()
            backoff_s = _FIRST_BACKOFF_S if was_up else min(_MAX_BACKOFF_S, 2 * backoff_s)
            # Many routers must not reconnect to a restarted scheduler at the same moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s * random.uniform(0.5, 1.0)):  # noqa: S311
                    await self._is_gone.wait()

    def expect(self, *, is_leaving: bool, is_gone: bool) -> None:
        """Send a leaving scheduler nothing new; do not connect again to one that has gone."""
        self._is_leaving = is_leaving
        if is_gone:
            self._is_gone.set()
        else:
            self._is_gone.clear()

    async def _serve_connection(self) -> bool:
        """One connection from its beginning to its end; returns whether it ever worked."""
        call = self._stub.Connect()
        watch = self._stub.WatchPool(scheduler_pb2.WatchPoolRequest())
        # Not a TaskGroup: a group that fails while it is cancelled forgets the cancellation, and
        # the client would connect again in a router that is shutting down.
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._watch(watch)),
            asyncio.create_task(self._give_up()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = next(iter(done))
            self._log_loss(None if ended.cancelled() else ended.exception())
        finally:
            # A stream that is no longer read does not end by itself.
            call.cancel()
            watch.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            was_up = self._is_up
            self._forget_connection()
        return was_up

    def _forget_connection(self) -> None:
        if self._is_up:
            self._requests.on_lost(self)
        self._is_up = False
        self.workers = []
        # Requests that were not sent yet are requeued with the others.
        self._outbox.clear()
        self._has_mail.clear()

    def _log_loss(self, error: BaseException | None) -> None:
        name = self._name
        match error:
            case ServiceError(reason=reason):
                self._error = error.message
                if reason == VERSION_SKEW:
                    logger.error("not connected: %s", error.message)
                else:
                    logger.error("scheduler %s speaks wrongly: %s", name, error.message)
            case grpc.aio.AioRpcError():
                self._error = connect_failure(error.details() or "")
                level = logging.WARNING if self._is_up else logging.INFO
                logger.log(level, "scheduler %s is not reachable: %s", name, self._error)
            case None | _StreamEndedError() | asyncio.InvalidStateError():
                logger.warning("scheduler %s ended the connection", name)
            case _:
                # A bug ends this connection, not the router.
                logger.error("the connection to scheduler %s failed", name, exc_info=error)

    async def _read(self, call: Any) -> None:
        async for message in call:
            if message.HasField("step_update"):
                self._requests.on_step(scheduler_wire.to_step_outputs(message.step_update))
            if message.moved:
                self._requests.on_moved(message.moved)
            for request_id in message.aborts:
                self._router.abort(request_id)
            for refusal in message.refusals:
                self._requests.on_refusal(scheduler_wire.to_refusal(refusal))
        raise _StreamEndedError

    async def _write(self, call: Any) -> None:
        hello = scheduler_pb2.Hello(router_id=self._router_id, version=version())
        await call.write(scheduler_pb2.RouterMessage(hello=hello))
        while True:
            await self._has_mail.wait()
            self._has_mail.clear()
            while self._outbox:
                await call.write(self._outbox.take())
                await asyncio.sleep(_MESSAGE_GAP_S)

    async def _give_up(self) -> None:
        """Ends an attempt to connect to a scheduler that has gone."""
        await self._is_gone.wait()
        if self._is_up:  # it may have requests; its end ends the connection
            await asyncio.Event().wait()
        raise _StreamEndedError

    async def _watch(self, watch: Any) -> None:
        async for snapshot in watch:
            self._scheduler_id, self._version = snapshot.scheduler_id, snapshot.version
            if snapshot.time_unix_s:
                self._clock_offset_s = snapshot.time_unix_s - time.time()
            if not self._is_up:
                check_peer(f"scheduler {self._name}", snapshot.version, "this router")
                self._is_up = True
                logger.info("scheduler %s is connected", self._name)
                self._requests.on_connected(self)
            self.workers = list(snapshot.workers)
            self._requests.on_report(
                self.name,
                [scheduler_wire.to_report(worker) for worker in snapshot.workers],
                is_draining=snapshot.draining or self._is_leaving,
            )
        raise _StreamEndedError


class _StreamEndedError(Exception):
    """The scheduler closed a stream that should stay open."""
