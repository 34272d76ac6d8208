"""The gRPC client of one gpuworker: an Execute stream, plans out, results in."""

import asyncio
from collections.abc import Sequence

import grpc.aio

from headrace.service.channels import ChannelConfig, open_channel
from headrace.service.errors import ServiceError
from headrace.v1 import common_pb2, gpuworker_pb2, gpuworker_pb2_grpc
from scheduler.core.plan import StepPlan
from scheduler.rpc import wire
from scheduler.worker import (
    Draining,
    WorkerLostError,
    WorkerResult,
    WorkerSpec,
    WorkerUnavailableError,
)

# A worker that is stopped (not dead) accepts calls and answers none.
_DESCRIBE_TIMEOUT_S = 5.0


class GpuWorkerClient:
    """A client of one address; owns the channel."""

    def __init__(self, address: str, config: ChannelConfig) -> None:
        self._channel = open_channel(address, config)
        self._stub = gpuworker_pb2_grpc.GpuWorkerStub(self._channel)

    async def describe(self) -> WorkerSpec:
        """The worker's spec; WorkerUnavailableError until the worker answers."""
        try:
            response = await self._stub.Describe(
                gpuworker_pb2.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S
            )
            if response.worker.state == common_pb2.WORKER_STATE_DRAINING:
                raise WorkerUnavailableError("it is shutting down")
            return wire.worker_info(response.worker)
        except grpc.aio.AioRpcError as error:
            raise WorkerUnavailableError(f"{error.code().name}: {error.details()}") from error
        except ServiceError as error:
            raise WorkerUnavailableError(f"it describes itself wrongly: {error}") from error

    def execute(self) -> "ExecuteStream":
        """A new stream of steps."""
        return ExecuteStream(self._stub.Execute())

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
            raise WorkerLostError(_describe_error(error)) from error

    async def receive(self) -> WorkerResult | Draining:
        """The next result; see scheduler.worker.WorkerStream."""
        try:
            message = await self._call.read()
            if not isinstance(message, gpuworker_pb2.StepResult):
                raise WorkerLostError("it ended the stream")
            return Draining() if message.draining else wire.worker_result(message)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise WorkerLostError(_describe_error(error)) from error
        except ServiceError as error:
            raise WorkerLostError(f"its result is wrong: {error}") from error

    def close(self) -> None:
        """Cancel the call."""
        self._call.cancel()


def _describe_error(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
