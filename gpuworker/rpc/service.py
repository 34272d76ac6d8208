"""The GpuWorker service: plans in, results out, one stream at a time.

The model runs on its own thread, so that health checks, keepalive and the next plan are served
during a long step. Steps start in the order of their plans; a step may start while the device works
on the step before. The stream's reader submits plans as they arrive, and its writer sends results
as steps finish.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import grpc.aio
import torch
from opentelemetry.trace import Span

from gpuworker.core.plan import ExecutedStep, PlanError, ReceivedPlan
from gpuworker.engine import LoadedModel
from gpuworker.metrics import StepMeter
from gpuworker.pipeline import StepPipeline
from gpuworker.rpc import wire
from gpuworker.runner import PendingStep
from headrace.service import telemetry, terms
from headrace.service.errors import (
    ServiceError,
    aborted,
    failed_precondition,
    internal,
    invalid,
    unavailable,
    unimplemented,
)
from headrace.service.protocol import WORKER_ROLE
from headrace.service.versions import check_peer, version
from headrace.v1 import common_pb2, gpuworker_pb2, gpuworker_pb2_grpc
from headrace.vocabulary import WorkerRole

logger = logging.getLogger(__name__)

FULL_NAME = "headrace.v1.GpuWorker"
# Plans read ahead of the running step; a scheduler sends one or two.
_MAX_PLANS_AHEAD = 8
_LOADING_RETRY_S = 1.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """The identity of this worker; incarnation differs for each process."""

    worker_id: str
    model_name: str
    role: WorkerRole
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)


class _DrainingNotice:
    """Queued like a result: tells the scheduler that this worker shuts down."""


class _Stream:
    """One Execute call: futures of results in the order of plans, ended by None or an error."""

    def __init__(self, term: int) -> None:
        self.term = term
        self.is_current = True
        self.results: asyncio.Queue[
            asyncio.Future[ExecutedStep] | _DrainingNotice | ServiceError | None
        ] = asyncio.Queue()
        self.room = asyncio.Semaphore(_MAX_PLANS_AHEAD)
        self._is_draining_announced = False

    def announce_draining(self) -> None:
        """Queues the draining notice once, behind the results that are still due."""
        if self.is_current and not self._is_draining_announced:
            self._is_draining_announced = True
            self.results.put_nowait(_DrainingNotice())


class GpuWorkerService(gpuworker_pb2_grpc.GpuWorkerServicer):
    """Serves a model; until the model is loaded, calls are UNAVAILABLE.

    Args:
        identity: of this worker.
        model_thread: an executor of one thread, which alone touches the engine's runner.
    """

    def __init__(self, identity: WorkerIdentity, model_thread: ThreadPoolExecutor) -> None:
        self._identity = identity
        self._model_thread = model_thread
        self._pipeline = StepPipeline(model_thread)
        self.engine: LoadedModel | None = None
        self.meter = StepMeter()
        self._is_draining = False
        self._stream: _Stream | None = None
        # The greatest term of a lease that this worker has seen.
        self._fence = 0
        self._num_queued = 0
        # When work came that found nothing queued, or was done.
        self._progress_s = time.monotonic()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_device_lost = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        gpuworker_pb2_grpc.add_GpuWorkerServicer_to_server(self, server)

    def set_engine(self, engine: LoadedModel) -> None:
        """The model is loaded."""
        self.engine = engine

    async def device_lost(self) -> None:
        """Waits until the device has failed in a step: this process cannot use the device again."""
        await self._is_device_lost.wait()

    def waits_s(self) -> float:
        """For how long there has been work for the model's thread of which none got done."""
        return time.monotonic() - self._progress_s if self._num_queued else 0.0

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new streams, announces draining, and waits until all rows are free.

        Returns False if that took longer than the timeout.
        """
        self._is_draining = True
        if self._stream is not None:
            self._stream.announce_draining()
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            return False
        return True

    def close_stream(self) -> None:
        """Ends the current stream; its scheduler moves the requests to another worker."""
        self._end_stream(unavailable("DRAINED", "this worker has shut down; use another"))

    async def Describe(
        self, request: gpuworker_pb2.DescribeRequest, _context: Any
    ) -> gpuworker_pb2.DescribeResponse:
        check_peer("the scheduler", request.version, f"worker {self._identity.worker_id}")
        engine = self._require_engine()
        limits = engine.runner.limits
        return gpuworker_pb2.DescribeResponse(
            worker=common_pb2.Worker(
                worker_id=self._identity.worker_id,
                incarnation=self._identity.incarnation,
                model=self._identity.model_name,
                role=WORKER_ROLE.number(self._identity.role),
                state=(
                    common_pb2.WORKER_STATE_DRAINING
                    if self._is_draining
                    else common_pb2.WORKER_STATE_READY
                ),
                max_model_len=limits.max_model_len,
                block_size=limits.block_size,
                num_kv_blocks=limits.num_kv_blocks - 1,
                max_num_seqs=limits.max_num_seqs,
                vocab_size=limits.vocab_size,
                eos_token_ids=limits.eos_token_ids,
                device=engine.device,
                dtype=engine.dtype,
                max_num_batched_tokens=limits.max_num_batched_tokens,
                num_spec_tokens=engine.runner.num_spec_tokens,
                pipeline_depth=engine.pipeline_depth,
                version=version(),
                driver=engine.driver,
                device_memory_bytes=engine.device_memory_bytes,
            )
        )

    async def Execute(
        self, plans: AsyncIterator[gpuworker_pb2.StepPlan], context: Any
    ) -> AsyncIterator[gpuworker_pb2.StepResult]:
        engine = self._require_engine()
        if self._is_draining:
            raise unavailable("DRAINING", "this worker is shutting down")
        stream = self._replace_stream(terms.term_in(context.invocation_metadata()) or 0)
        reader = asyncio.create_task(self._read(engine, stream, plans))
        reader.add_done_callback(partial(_end_broken, stream))
        try:
            # Before any result: a scheduler counts on the worker only once it has the stream.
            await context.send_initial_metadata(terms.metadata_of(stream.term))
            while True:
                result = await stream.results.get()
                if result is None:
                    return
                if isinstance(result, ServiceError):
                    raise result
                if isinstance(result, _DrainingNotice):
                    yield gpuworker_pb2.StepResult(draining=True)
                    continue
                yield wire.step_result(await self._finished(result))
                stream.room.release()
        finally:
            reader.cancel()
            if stream.is_current:
                stream.is_current = False
                self._run_on_model_thread(partial(self._reset, engine))

    async def TransferBlocks(
        self, _chunks: AsyncIterator[gpuworker_pb2.BlockChunk], _context: Any
    ) -> gpuworker_pb2.BlockReceipt:
        raise unimplemented(
            "NO_BLOCK_TRANSFER", "this worker cannot take KV blocks over; let it recompute them"
        )

    def _require_engine(self) -> LoadedModel:
        if self.engine is None:
            raise unavailable(
                "MODEL_LOADING", "the model is being loaded", retry_after_s=_LOADING_RETRY_S
            )
        return self.engine

    def _replace_stream(self, term: int) -> _Stream:
        """Ends the current stream and returns a new stream, which becomes current.

        Raises:
            ServiceError: FAILED_PRECONDITION, if the current stream lives and has a greater term,
                or a stream had a greater term of a lease.
        """
        current = self._stream
        is_older = current is not None and current.is_current and current.term > term
        if is_older or self._fence > term:
            raise failed_precondition(
                terms.NEWER_OWNER,
                "a scheduler that was started later, or has the lease, drives this worker; use"
                " another worker, or try again when that scheduler has gone",
            )
        if term >= terms.FIRST_LEASED:
            self._fence = term
        self._end_stream(
            aborted(terms.STREAM_REPLACED, "another Execute stream has taken this worker over")
        )
        self._stream = _Stream(term)
        return self._stream

    def _end_stream(self, error: ServiceError) -> None:
        """Ends the current stream, if any, and drops the plans that the stream has queued."""
        if self._stream is not None and self._stream.is_current:
            self._stream.is_current = False
            self._stream.results.put_nowait(error)

    async def _read(
        self,
        engine: LoadedModel,
        stream: _Stream,
        plans: AsyncIterator[gpuworker_pb2.StepPlan],
    ) -> None:
        """Hands plans to the model's thread as they arrive."""
        try:
            self._run_on_model_thread(partial(_if_current, stream, partial(self._reset, engine)))
            async for message in plans:
                await stream.room.acquire()
                plan = wire.step_plan(message)
                stream.results.put_nowait(self._step(engine, stream, plan))
            stream.results.put_nowait(None)
        except ServiceError as error:
            stream.results.put_nowait(error)

    def _step(
        self, engine: LoadedModel, stream: _Stream, plan: ReceivedPlan
    ) -> "asyncio.Future[ExecutedStep]":
        """Runs a stream's plan; the plan is dropped if the stream has ended by then."""
        runner, meter, begun_s = engine.runner, self.meter, 0.0

        def launch() -> PendingStep:
            nonlocal begun_s
            pending, begun_s = meter.launch(partial(runner.launch, plan), runner.num_requests)
            return pending

        def finish(pending: PendingStep) -> ExecutedStep:
            return meter.finish(pending.finish, begun_s)

        step = self._pipeline.submit(
            partial(_if_current, stream, launch),
            lambda pending: _if_current(stream, partial(finish, pending)),
        )
        if plan.traceparent:
            step.add_done_callback(partial(_end_span, _begin_span(plan)))
        return self._noted(asyncio.wrap_future(step))

    def _reset(self, engine: LoadedModel) -> None:
        """Empties every row, on the model's thread."""
        engine.runner.reset()
        self.meter.reset()

    def _run_on_model_thread(self, work: Callable[[], Any]) -> "asyncio.Future[Any]":
        return self._noted(asyncio.get_running_loop().run_in_executor(self._model_thread, work))

    def _noted(self, future: "asyncio.Future[T]") -> "asyncio.Future[T]":
        """Counts the work as in flight until the future is done."""
        if self._num_queued == 0:
            self._progress_s = time.monotonic()
        self._num_queued += 1
        self._is_idle.clear()
        future.add_done_callback(self._note_done)
        return future

    def _note_done(self, future: "asyncio.Future[Any]") -> None:
        self._num_queued -= 1
        self._progress_s = time.monotonic()
        # With nothing queued, the model's thread does not change the rows, so this thread may read.
        if self._num_queued == 0 and not self._require_engine().runner.num_requests:
            self._is_idle.set()
        # Marks the error as retrieved: no writer waits for a step whose stream has ended.
        if not future.cancelled() and (error := future.exception()) is not None:
            self.meter.num_failed += not isinstance(error, _StaleStreamError)
            if isinstance(error, torch.AcceleratorError):
                self._is_device_lost.set()

    async def _finished(self, future: "asyncio.Future[ExecutedStep]") -> ExecutedStep:
        try:
            return await asyncio.shield(future)
        except PlanError as error:
            logger.warning("refused a plan: %s", error)
            raise invalid("plan", str(error)) from error
        except _StaleStreamError:
            raise aborted(terms.STREAM_REPLACED, "another Execute stream took over") from None


def _end_broken(stream: _Stream, reader: "asyncio.Task[None]") -> None:
    """Ends a stream whose reader failed unexpectedly; its writer would wait for ever."""
    if not reader.cancelled() and (error := reader.exception()) is not None:
        logger.error("reading plans failed", exc_info=error)
        stream.results.put_nowait(
            internal("INTERNAL", f"reading plans failed: {type(error).__name__}; see the log")
        )


class _StaleStreamError(Exception):
    """A step whose stream ended before its turn came."""


def _if_current(stream: _Stream, work: Callable[[], T]) -> T:
    """Runs work on the model's thread, unless its stream has ended."""
    if not stream.is_current:
        raise _StaleStreamError
    return work()


def _begin_span(plan: ReceivedPlan) -> Span:
    """A span from the arrival of a step's plan to the step's result."""
    attributes = {
        "headrace.step_id": plan.step_id,
        "headrace.num_reqs": plan.num_reqs,
        "headrace.num_tokens": int(plan.num_scheduled_tokens.sum()),
    }
    return telemetry.begin_span("gpuworker step", plan.traceparent, attributes)


def _end_span(span: Span, step: "Future[ExecutedStep]") -> None:
    error = step.exception()
    if isinstance(error, _StaleStreamError):
        # The scheduler has left, or another one has come: nobody waits for the step.
        telemetry.fail(span, "cancelled", "", is_fault=False)
    elif error is not None:
        telemetry.note_error(span, error)
    span.end()
