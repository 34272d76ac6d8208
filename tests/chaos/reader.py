"""The reference client: reads one request to its end, by the protocol and nothing else.

Whatever breaks a call, the next call resumes at the token that is missing, on another router.
Before anything has come, the same Generate is sent again.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import grpc
import grpc.aio

from headrace.service.errors import ServiceError, from_rpc_error
from headrace.v1 import inference_pb2
from tests.chaos.received import Received
from tests.chaos.tally import Tally, logger

# A call that is silent for so long is given up: its router may be cut off.
_SILENCE_S = 20.0
_MAX_BACKOFF_S = 1.0
_MAX_NOT_FOUND = 6

Stubs = Mapping[str, Any]  # by router
Condition = Callable[[], bool]


class FailedError(Exception):
    """The request ended with an error that ends it for good."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(repr(error))
        self.error = error


class Reader:
    """Reads one request; several readers of one request are rivals.

    resumes: begin with Resume, though nothing has come yet.
    """

    def __init__(
        self,
        received: Received,
        stubs: Stubs,
        rng: Random,
        tally: Tally,
        *,
        router: str,
        resumes: bool = False,
    ) -> None:
        self.received = received
        self.router = router
        self._stubs = stubs
        self._rng = rng
        self._tally = tally
        self._resumes = resumes
        self._num_failures = 0
        self._num_not_found = 0
        self._is_forgotten = False  # no router knows the request any more

    async def read(
        self,
        until: Condition | None = None,
        *,
        pace_s: float = 0.0,
        follows: bool = True,
    ) -> None:
        """Reads to the end, or until the condition holds; then the call is closed.

        Args:
            until: asked after each message.
            pace_s: waits up to so long after some of the messages.
            follows: False ends quietly when another call has taken the request over.

        Raises:
            FailedError: the request ended with an error.
        """
        until = until or (lambda: False)
        while not self.received.is_finished and not until():
            call = self._open()
            try:
                await self._read_call(call, until, pace_s)
            except grpc.aio.AioRpcError as error:
                if not follows and from_rpc_error(error).reason == "RESUMED_ELSEWHERE":
                    self._tally.events["moved"] += 1
                    return
                await self._recover(error)
            except TimeoutError:
                self._tally.events["silent call"] += 1
                self._turn()
            finally:
                call.cancel()

    def _open(self) -> Any:
        stub, request = self._stubs[self.router], self.received.wanted.request
        # An aborted request that is sent again is a new request.
        is_known = self._resumes or self.received.is_begun or self.received.was_aborted
        if is_known and not self._is_forgotten:
            self._tally.events["resume"] += 1
            positions = self.received.positions
            resume = inference_pb2.ResumeRequest(request_id=request.request_id)
            if len(positions) == 1:
                resume.from_token = positions[0]
            else:
                resume.from_token_by_index.extend(positions)
            return stub.Resume(resume)
        self._tally.events["generate"] += 1
        if self._is_forgotten:
            again = inference_pb2.GenerateRequest()
            again.CopyFrom(request)
            again.from_token_by_index[:] = self.received.positions
            return stub.Generate(again)
        return stub.Generate(request)

    async def _read_call(self, call: Any, until: Condition, pace_s: float) -> None:
        request_id = self.received.wanted.request.request_id
        while True:
            async with asyncio.timeout(_SILENCE_S):
                response = await call.read()
            if response is grpc.aio.EOF:
                break
            self._num_failures = self._num_not_found = 0
            self._is_forgotten = False
            self.received.take(response)
            self._tally.progressed(request_id, is_prompt=not pace_s)
            if self.received.is_finished or until():
                break
            if pace_s and self._rng.random() < 0.1:
                await asyncio.sleep(self._rng.uniform(0, pace_s))
        if response is not grpc.aio.EOF:
            if self.received.is_finished:
                await self._read_out(call)
            return
        if await call.code() is not grpc.StatusCode.OK:
            raise await _error_of(call)
        if not self.received.is_finished:
            self.received.faults.append(f"a call ended well at {self.received.positions}")
            raise FailedError(
                ServiceError(grpc.StatusCode.INTERNAL, "CUT_SHORT", "ended too early")
            )

    async def _read_out(self, call: Any) -> None:
        """What comes after the last end: how completions ended that had ended before, no tokens."""
        async with asyncio.timeout(_SILENCE_S):
            while (response := await call.read()) is not grpc.aio.EOF:
                self.received.take(response)

    async def _recover(self, failure: grpc.aio.AioRpcError) -> None:
        """Waits, and turns to the other router; raises for what ends the request."""
        error = from_rpc_error(failure)
        # Whether Headrace says so, not the connection.
        is_ours = error.reason != error.code.name or error.code in _NEVER_RETRIED
        self._tally.events[error.reason] += 1
        request_id = self.received.wanted.request.request_id
        logger.info(
            "%s at %s, %s: %s", request_id, self.router, self.received.positions, error.reason
        )
        if error.reason in SEND_AGAIN:
            self._num_not_found += 1
            if self._num_not_found > _MAX_NOT_FOUND:
                if self._resumes or self.received.was_aborted:
                    raise FailedError(error)
                began_s, first_s = self.received.began_s, self.received.first_s
                self._tally.sent_again(request_id, error.reason, began_s, first_s)
                self._is_forgotten = True
        elif is_ours and error.code not in _RETRIED and error.reason not in _RETRIED_REASONS:
            raise FailedError(error)
        self._num_failures += 1
        most = min(_MAX_BACKOFF_S, 0.02 * 2 ** min(self._num_failures, 10))
        await asyncio.sleep(self._rng.uniform(0, most))
        self._turn()

    def _turn(self) -> None:
        others = [router for router in self._stubs if router != self.router]
        self.router = self._rng.choice(others)


# What says "send the request again": its output is the same, and the router leaves out what the
# client has.
SEND_AGAIN = {"UNKNOWN_REQUEST", "NOT_KEPT", "TOKENS_LOST"}
_NEVER_RETRIED = {grpc.StatusCode.DEADLINE_EXCEEDED}
_RETRIED = {grpc.StatusCode.UNAVAILABLE}
_RETRIED_REASONS = {
    *("RESUMED_ELSEWHERE", "QUEUE_FULL", "TENANT_QUEUE_FULL", "TOO_MANY_LIVE", "CANCELLED"),
}


async def _error_of(call: Any) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        await call.code(),
        await call.initial_metadata(),
        await call.trailing_metadata(),
        await call.details(),
    )


async def abort(stubs: Stubs, router: str, request_ids: Sequence[str]) -> list[int]:
    """The outcomes of one Abort call.

    Raises:
        ServiceError: no answer.
    """
    request = inference_pb2.AbortRequest(request_ids=request_ids)
    try:
        response = await stubs[router].Abort(request, timeout=_SILENCE_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return [outcome.result for outcome in response.outcomes]
