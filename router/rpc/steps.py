"""Steps of all workers, their batches, and the whole queue: what the schedulers say, merged.

Schedulers are asked only while a caller watches. A scheduler that does not answer, or is of a
version without steps, is left out.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable

import grpc
import grpc.aio

from headrace.service.errors import ServiceError, invalid, not_found
from headrace.v1 import steps_pb2
from router.request import ClientCompletion
from router.router import Router
from router.rpc.scheduler_client import SchedulerClient
from router.waiting import waiting

_HEARTBEAT_S = 1.0
_RETRY_S = 1.0
# Messages of schedulers that a caller has not read; then the schedulers wait.
_MAX_UNREAD = 8
_MAX_STEPS = 8192
_DEFAULT_LIMIT = 100
_MAX_LIMIT = 1000
_MAX_LISTED = 10_000
MAX_HISTORY_S = 3600.0


async def watch_steps(
    schedulers: Callable[[], Iterable[SchedulerClient]], request: steps_pb2.WatchStepsRequest
) -> AsyncGenerator[steps_pb2.WatchStepsResponse, None]:
    """The steps of all workers, until the caller leaves."""
    if not 0 <= request.history_s <= MAX_HISTORY_S:
        raise invalid("history_s", f"must be 0 to {MAX_HISTORY_S:g}")
    merge = _Merge(schedulers, request)
    keeping = asyncio.create_task(merge.keep_reading(), name="watch the steps of schedulers")
    try:
        while True:
            yield await merge.take()
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])


class _Merge:
    """The streams of all schedulers, while schedulers come and go."""

    def __init__(
        self,
        schedulers: Callable[[], Iterable[SchedulerClient]],
        request: steps_pb2.WatchStepsRequest,
    ) -> None:
        self._schedulers = schedulers
        self._history_s = request.history_s
        self._positions = {after.worker_id: after.position for after in request.after}
        self._unread: asyncio.Queue[steps_pb2.WatchStepsResponse] = asyncio.Queue(_MAX_UNREAD)

    async def take(self) -> steps_pb2.WatchStepsResponse:
        """What has come since; an empty message when nothing comes for a while."""
        response = steps_pb2.WatchStepsResponse()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEARTBEAT_S):
                response = await self._unread.get()
        num_steps = _num_steps(response)
        while not self._unread.empty() and num_steps < _MAX_STEPS:
            more = self._unread.get_nowait()
            num_steps += _num_steps(more)
            response.MergeFrom(more)
        return response

    async def keep_reading(self) -> None:
        """Read every scheduler that there is, until cancelled."""
        reading: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for scheduler in self._schedulers():
                    task = reading.get(scheduler.name)
                    if task is None or task.done():
                        reading[scheduler.name] = asyncio.create_task(self._read(scheduler))
                await asyncio.sleep(_RETRY_S)
        finally:
            for task in reading.values():
                task.cancel()
            await asyncio.gather(*reading.values(), return_exceptions=True)

    async def _read(self, scheduler: SchedulerClient) -> None:
        """Read one scheduler until its stream ends."""
        call = scheduler.watch_steps(
            steps_pb2.WatchStepsRequest(
                after=[
                    steps_pb2.StepPosition(worker_id=worker_id, position=position)
                    for worker_id, position in self._positions.items()
                ],
                history_s=self._history_s,
            )
        )
        try:
            async for response in call:
                if response.workers:
                    await self._unread.put(response)
                    for worker in response.workers:
                        self._positions[worker.worker_id] = worker.steps[-1].position
        except grpc.aio.AioRpcError:
            return  # the link to the scheduler says why
        finally:
            call.cancel()


def _num_steps(response: steps_pb2.WatchStepsResponse) -> int:
    return sum(len(worker.steps) for worker in response.workers)


async def step_batch(
    schedulers: Iterable[SchedulerClient], request: steps_pb2.GetStepBatchRequest
) -> steps_pb2.GetStepBatchResponse:
    """The requests of a step, from the scheduler that has them.

    Raises:
        ServiceError: no scheduler has them (any more).
    """
    if not request.worker_id:
        raise invalid("worker_id", "must be a worker's")
    for scheduler in schedulers:
        try:
            return await scheduler.step_batch(request)
        except ServiceError as error:
            if error.code not in _ABSENT:
                raise
    raise not_found(
        "UNKNOWN_STEP",
        f"no scheduler keeps the batch of step {request.position} of {request.worker_id!r};"
        " only the latest steps of each worker have theirs",
    )


_ABSENT = frozenset({
    grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAVAILABLE,
})  # fmt: skip


async def list_queue(
    router: Router, schedulers: Iterable[SchedulerClient], request: steps_pb2.ListQueueRequest
) -> steps_pb2.ListQueueResponse:
    """A page of the requests that wait: those that schedulers have, then the router's."""
    limit = request.limit or _DEFAULT_LIMIT
    if limit > _MAX_LIMIT:
        raise invalid("limit", f"must be at most {_MAX_LIMIT}")
    if request.offset > _MAX_LISTED:
        raise invalid("offset", f"must be at most {_MAX_LISTED}")
    end = min(request.offset + limit, _MAX_LISTED)
    answers = await asyncio.gather(*(_waiting_in(scheduler, end) for scheduler in schedulers))
    found = [one for answer in answers for one in answer.requests][:end]
    num_waiting = sum(answer.num_waiting for answer in answers)
    if len(found) < end:
        found.extend(_waiting(*pair) for pair in waiting(router, end - len(found)))
    return steps_pb2.ListQueueResponse(
        requests=found[request.offset : end], num_waiting=num_waiting + router.num_queued
    )


async def _waiting_in(scheduler: SchedulerClient, limit: int) -> steps_pb2.ListWaitingResponse:
    try:
        return await scheduler.list_waiting(limit)
    except ServiceError:
        return steps_pb2.ListWaitingResponse()


def _waiting(completion: ClientCompletion, reason: str) -> steps_pb2.WaitingRequest:
    request = completion.request
    return steps_pb2.WaitingRequest(
        request_id=completion.request_id,
        tenant=request.spec.tenant,
        model=request.spec.model,
        num_tokens=completion.num_tokens,
        priority=request.spec.priority,
        arrival_time_unix_s=request.arrived_unix_s,
        reason=reason,
    )
