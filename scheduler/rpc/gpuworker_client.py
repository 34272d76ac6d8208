"""The gRPC client of one gpuworker: an Execute stream, plans out, results in."""

import asyncio
from collections.abc import Sequence

import grpc.aio

from headrace.service import terms
from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.errors import ServiceError, from_rpc_error
from headrace.service.versions import VERSION_SKEW, check_peer, version
from headrace.v1 import common_pb2, gpuworker_pb2, gpuworker_pb2_grpc
from scheduler.core.plan import StepPlan
from scheduler.rpc import wire
from scheduler.worker import (
    Draining,
    WorkerLostError,
    WorkerResult,
    WorkerSpec,
    WorkerTakenError,
    WorkerTakenOverError,
    WorkerUnavailableError,
)

# A worker that is stopped (not dead) accepts calls and answers none.
_ANSWER_TIMEOUT_S = 5.0


class GpuWorkerClient:
    """A client of one address; owns the channel.

    term: of two schedulers that drive one worker, the one with the smaller term yields.
    """

    def __init__(self, address: str, config: ChannelConfig, *, term: int) -> None:
        self._term = term
        self._channel = open_channel(address, config)
        self._stub = gpuworker_pb2_grpc.GpuWorkerStub(self._channel)

    async def describe(self) -> WorkerSpec:
        """The worker's spec; WorkerUnavailableError until the worker answers."""
        try:
            response = await self._stub.Describe(
                gpuworker_pb2.DescribeRequest(version=version()), timeout=_ANSWER_TIMEOUT_S
            )
            check_peer("the worker", response.worker.version, "this scheduler")
            if response.worker.state == common_pb2.WORKER_STATE_DRAINING:
                raise WorkerUnavailableError("it is shutting down")
            return wire.worker_info(response.worker)
        except grpc.aio.AioRpcError as error:
            raise WorkerUnavailableError(f"{error.code().name}: {error.details()}") from error
        except ServiceError as error:
            if error.reason == VERSION_SKEW:
                raise WorkerUnavailableError(error.message) from error
            raise WorkerUnavailableError(f"it describes itself wrongly: {error}") from error

    async def execute(self) -> "ExecuteStream":
        """A new stream of steps, once the worker has taken it; see WorkerConnector."""
        call = self._stub.Execute(metadata=terms.metadata_of(self._term))
        is_taken = False
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                is_taken = terms.term_in(await call.initial_metadata()) is not None
                if not is_taken:
                    await call.read()
                    raise WorkerUnavailableError("it ended the stream")
        except TimeoutError:
            raise WorkerUnavailableError("it does not answer") from None
        except grpc.aio.AioRpcError as error:
            is_newer = from_rpc_error(error).reason == terms.NEWER_OWNER
            kind = WorkerTakenError if is_newer else WorkerUnavailableError
            raise kind(_describe_error(error)) from error
        finally:
            if not is_taken:
                call.cancel()
        return ExecuteStream(call)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class ExecuteStream:
    """One Execute call. `close` must be called: dropping the call does not cancel it."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[gpuworker_pb2.StepPlan, gpuworker_pb2.StepResult]",
    ) -> None:
        self._call = call

    async def send(
        self,
        plan: StepPlan,
        samplings: Sequence[object],
        traceparent: str,
        *,
        wants_audit: bool = False,
    ) -> None:
        """Send a plan; see scheduler.worker.WorkerStream."""
        try:
            message = wire.plan_message(plan, samplings, traceparent, wants_audit=wants_audit)
            await self._call.write(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            # How the call ended says more than that it cannot be written to.
            raise _loss(await self._status() or error) from error

    async def _status(self) -> grpc.aio.AioRpcError | None:
        """The error that ended the call, if it has ended with one."""
        if self._call.done():
            try:
                await self._call.read()
            except grpc.aio.AioRpcError as error:
                return error
        return None

    async def receive(self) -> WorkerResult | Draining:
        """The next result; see scheduler.worker.WorkerStream."""
        try:
            message = await self._call.read()
            if not isinstance(message, gpuworker_pb2.StepResult):
                raise WorkerLostError("it ended the stream")
            return Draining() if message.draining else wire.worker_result(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise _loss(error) from error
        except ServiceError as error:
            raise WorkerLostError(f"its result is wrong: {error}") from error

    def close(self) -> None:
        """Cancel the call."""
        self._call.cancel()


def _loss(error: Exception) -> WorkerLostError:
    """What the error of a stream means."""
    kind = WorkerLostError
    if isinstance(error, grpc.aio.AioRpcError):
        is_taken_over = from_rpc_error(error).reason == terms.STREAM_REPLACED
        kind = WorkerTakenOverError if is_taken_over else WorkerLostError
    return kind(_describe_error(error))


def _describe_error(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
