"""A scheduler in this process between fake gpuworkers and a fake router, over real gRPC."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.columns import pack_int32, unpack_int32, unpack_uint32
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.status.states import Writer
from headrace.status.store import StatusStore
from headrace.v1 import common_pb2, inference_pb2, scheduler_pb2, scheduler_pb2_grpc
from headrace.vocabulary import WorkerState
from scheduler.build import build_pool, keep_journal
from scheduler.config import PoolSettings, SchedulerSettings
from scheduler.core.plan import RequestStatus
from scheduler.orphans import Orphans
from scheduler.pool import Pool
from scheduler.request_log import RequestLog
from scheduler.requests import NO_ROUTER
from scheduler.rpc.gpuworker_client import GpuWorkerClient
from scheduler.rpc.service import FULL_NAME, SchedulerService
from scheduler.switchboard import Switchboard
from tests.scheduler.core.building import check_book
from tests.scheduler.fake_gpuworker import FakeGpuWorker

# Only what hangs takes so long, however slow and busy the machine.
PATIENCE_S = 60.0


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of another task's making."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 it has no event to wait for
            await asyncio.sleep(0.002)


@dataclass
class RunningScheduler:
    """A scheduler; its clock is the machine's, put forward by `skipped_s`."""

    address: str = ""
    pool: Pool = field(init=False)
    switchboard: Switchboard = field(init=False)
    service: SchedulerService = field(init=False)
    skipped_s: float = 0.0

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time() + self.skipped_s

    async def ready(self, num_workers: int = 1) -> None:
        """Wait until that many workers take requests."""
        await until(lambda: len(self.ready_workers()) == num_workers)

    def ready_workers(self) -> list[str]:
        loads = self.pool.snapshot()
        return [load.info.worker_id for load in loads if load.state is WorkerState.READY]

    def num_free_blocks(self) -> list[int]:
        return [load.num_free_blocks for load in self.pool.snapshot()]


@asynccontextmanager
async def running_scheduler(
    workers: Sequence[FakeGpuWorker],
    settings: SchedulerSettings | None = None,
    pool_settings: PoolSettings | None = None,
    store: StatusStore | None = None,
    *,
    term: int = 1,
    has_company: bool = False,
) -> AsyncIterator[RunningScheduler]:
    """A scheduler over started workers. At the end nothing of any request may be left.

    has_company: other services of the test run on in this process, with tasks of their own.
    """
    tasks_before = asyncio.all_tasks()
    scheduler = RunningScheduler()
    store = store or StatusStore("", Writer.SCHEDULER)
    pool_settings = pool_settings or PoolSettings()
    switchboard = Switchboard(RequestLog(store, "s0", clock=time.time))
    pool = build_pool(
        switchboard, settings or SchedulerSettings(), pool_settings, clock=scheduler.now
    )
    for w in workers:
        pool.add(w.address, GpuWorkerClient(w.address, ChannelConfig(), term=term))
    orphans = Orphans(
        switchboard.requests,
        ttl_s=pool_settings.orphan_ttl_s,
        max_num_unread_tokens=pool_settings.max_orphan_tokens,
    )
    keep_journal(store, switchboard, orphans)
    service = SchedulerService(
        "s0", switchboard, pool, orphans, max_waiting_tokens=pool_settings.max_waiting_tokens
    )
    server = GrpcServer(ServingConfig(), [FULL_NAME])
    service.add_to(server.server)
    scheduler.address = await server.start()
    scheduler.pool, scheduler.switchboard, scheduler.service = pool, switchboard, service
    driving = [asyncio.create_task(job) for job in (pool.run(), orphans.run())]
    try:
        yield scheduler
        await until(lambda: _has_no_request(switchboard))
        _check_nothing_is_left(pool, switchboard)
    finally:
        await server.stop(0)
        for task in driving:
            task.cancel()
        await asyncio.wait(driving)
        for worker in workers:
            await worker.kill()
    for worker in workers:
        assert not worker.errors, worker.errors
    if has_company:
        return
    await until(lambda: asyncio.all_tasks() <= tasks_before)
    # The __del__ of a gRPC server shuts it down (again), which needs a running loop.
    del server, service, scheduler
    gc.collect()
    await until(lambda: asyncio.all_tasks() <= tasks_before)


def _has_no_request(switchboard: Switchboard) -> bool:
    """Whether no request lives; ends those that no router has."""
    for request in switchboard.requests:
        if request.connection == NO_ROUTER:
            request.owner.cancel(request, RequestStatus.ABORTED)
    return not len(switchboard.requests)


def _check_nothing_is_left(pool: Pool, switchboard: Switchboard) -> None:
    assert not switchboard.log.traces
    assert not pool._stranded
    assert not any(switchboard._by_handle.values())
    assert not switchboard.requests._by_id
    for worker in pool._workers:
        if (engine := worker.engine) is not None:
            check_book(engine._core)
            assert not engine._core.has_unfinished
            assert not engine._requests
            assert not engine._inbox.is_hashing
            assert engine.num_free_blocks == engine.info.num_kv_blocks


@dataclass
class Received:
    """What came back for one handle."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    admitted: scheduler_pb2.Admitted | None = None
    finished: scheduler_pb2.Finished | None = None
    refusal: scheduler_pb2.Refusal | None = None
    has_moved: bool = False


class FakeRouter:
    """One Connect stream, and all that came over it."""

    def __init__(self, address: str, router_id: str, channel: grpc.aio.Channel | None = None):
        self._channel = channel or open_channel(address)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self._channel)
        self.call = self.stub.Connect()
        self.router_id = router_id
        self.received: dict[int, Received] = {}
        self.error: grpc.aio.AioRpcError | None = None
        self.messages: list[scheduler_pb2.SchedulerMessage] = []
        self.is_over = False
        self.changed = asyncio.Condition()
        self._num_handles = 0

    async def submit(self, prompt: Sequence[int], max_tokens: int, **fields: object) -> int:
        """Send a request; sampling fields go by `sampling`, others are the Submission's."""
        return (await self.submit_all([(prompt, max_tokens)], **fields))[0]

    async def submit_all(
        self, requests: Sequence[tuple[Sequence[int], int]], **fields: object
    ) -> list[int]:
        submissions = [self.submission(prompt, n, **fields) for prompt, n in requests]
        await self.send(submissions=submissions)
        return [submission.handle for submission in submissions]

    def submission(
        self, prompt: Sequence[int], max_tokens: int, **fields: object
    ) -> scheduler_pb2.Submission:
        handle = self._num_handles
        self._num_handles += 1
        self.received[handle] = Received()
        sampling = common_pb2.SamplingParams(seed=0, max_tokens=max_tokens)
        sampling.MergeFrom(fields.pop("sampling", common_pb2.SamplingParams()))
        values = {
            "handle": handle,
            "request_id": f"{self.router_id}-{handle}",
            "epoch": 1,
            "model": "fake",
            "prompt_token_ids": pack_int32(np.array(prompt, dtype=np.int32)),
            "sampling": sampling,
            "arrival_time_unix_s": 1.0,
        }
        return scheduler_pb2.Submission(**(values | fields))

    async def send(self, **fields: object) -> None:
        await self.call.write(scheduler_pb2.RouterMessage(**fields))

    async def cancel(self, *handles: int, reason: int = scheduler_pb2.CANCEL_REASON_ABORTED):
        await self.send(
            cancellations=[scheduler_pb2.Cancellation(handle=h, reason=reason) for h in handles]
        )

    async def audit(self) -> list[common_pb2.WorkerAudit]:
        return list((await self.stub.Audit(inference_pb2.AuditPoolRequest())).workers)

    async def pause(self, *handles: int, paused: bool = True) -> None:
        await self.send(pauses=[scheduler_pb2.Pause(handle=h, paused=paused) for h in handles])

    async def finished(self, *handles: int, patience_s: float = PATIENCE_S) -> list[list[int]]:
        """Tokens of each, once all have ended."""
        await self.wait_for(lambda: all(self.received[h].finished for h in handles), patience_s)
        return [self.received[h].token_ids for h in handles]

    async def has_tokens(self, handle: int, num_tokens: int) -> None:
        await self.wait_for(lambda: len(self.received[handle].token_ids) >= num_tokens)

    async def refused(self, handle: int) -> scheduler_pb2.Refusal:
        await self.wait_for(lambda: self.received[handle].refusal is not None)
        return self.received[handle].refusal

    async def ended(self) -> grpc.aio.AioRpcError | None:
        await self.wait_for(lambda: self.is_over)
        return self.error

    async def wait_for(self, condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
        async with asyncio.timeout(patience_s), self.changed:
            await self.changed.wait_for(condition)

    async def read(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                self._take(message)
                async with self.changed:
                    self.changed.notify_all()
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass
        self.is_over = True
        async with self.changed:
            self.changed.notify_all()

    def _take(self, message: scheduler_pb2.SchedulerMessage) -> None:
        self.messages.append(message)
        for refusal in message.refusals:
            self.received[refusal.handle].refusal = refusal
        if message.HasField("step_update"):
            self._take_step(message.step_update)
        for handle in message.moved:
            assert not self.received[handle].has_moved, "moved twice"
            self.received[handle].has_moved = True

    def _take_step(self, update: scheduler_pb2.StepUpdate) -> None:
        counts = unpack_int32(update.num_new_tokens, "num_new_tokens").tolist()
        handles = unpack_uint32(update.handles, "handles").tolist()
        token_ids = unpack_int32(update.token_ids, "token_ids").tolist()
        assert len(set(handles)) == len(handles), "a handle comes up twice"
        assert len(token_ids) == sum(counts)
        for admitted in update.admitted:
            assert self.received[admitted.handle].admitted is None, "admitted twice"
            self.received[admitted.handle].admitted = admitted
        for handle, count in zip(handles, counts, strict=True):
            received = self.received[handle]
            assert received.finished is None, "tokens after the end"
            assert not received.has_moved, "tokens after it moved"
            received.token_ids += token_ids[:count]
            del token_ids[:count]
        for entry in update.logprobs:
            received = self.received[entry.handle]
            received.logprobs += entry.tokens
            received.prompt_logprobs += entry.prompt_tokens
        for finished in update.finished:
            assert self.received[finished.handle].finished is None, "finished twice"
            assert not self.received[finished.handle].has_moved, "finished after it moved"
            self.received[finished.handle].finished = finished

    async def close(self) -> None:
        self.call.cancel()
        await self._channel.close()


@asynccontextmanager
async def router_to(
    scheduler: RunningScheduler, router_id: str = "r0"
) -> AsyncIterator[FakeRouter]:
    router = FakeRouter(scheduler.address, router_id)
    reading = asyncio.create_task(router.read())
    try:
        await router.send(hello=scheduler_pb2.Hello(router_id=router_id))
        yield router
    finally:
        await router.close()
        await reading
