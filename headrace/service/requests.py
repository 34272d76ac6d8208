"""Reads and decodes requests, bounding the memory that undecoded and decoded requests take.

A request is read after the token is checked (`auth`), and decoded if its number of fields is within
bounds. Large requests are decoded a few at a time, first come, first served: the bytes of a request
count until its handler calls `release_request` or the call ends.
"""

import asyncio
from contextvars import ContextVar
from typing import Any, cast

import grpc.aio
from google.protobuf.message import DecodeError, Message

from headrace.service.auth import is_health
from headrace.service.call_limit import CallLimit
from headrace.service.call_metrics import CallMeter
from headrace.service.errors import ServiceError, exhausted, malformed
from headrace.service.handlers import over_bytes
from headrace.service.message_size import MAX_FIELDS, too_many_fields

# Requests received at a time; a further request ends the oldest that takes longer than _READ_S.
_MAX_READS = 32
_READ_S = 2.0
# Smaller requests are decoded at once.
_MAX_SMALL_BYTES = 64 * 1024
_MAX_LARGE_BYTES = 16 * 1024 * 1024
_MAX_WAITING_BYTES = 32 * 1024 * 1024
# A health check names a service. Callers need no token, so size and number are small.
_MAX_HEALTH_BYTES = 1024
_MAX_HEALTH_READS = 64

_held: ContextVar["_Held | None"] = ContextVar("headrace_request", default=None)


class RequestReader:
    """Reads and decodes requests for the registered handlers of a server."""

    def __init__(self, meter: CallMeter) -> None:
        """meter: counts the calls whose request is not taken."""
        self._meter = meter
        self._large = LargeRequests(_MAX_LARGE_BYTES, _MAX_WAITING_BYTES)
        self._decoding = asyncio.Lock()
        self._reads = CallLimit(_MAX_READS, _READ_S)
        self._health_reads = CallLimit(_MAX_HEALTH_READS)

    def wrap(self, handler: Any, method: str) -> Any:
        """The handler over bytes for a registered handler."""
        # FromString is a class method of the message.
        message = handler.request_deserializer.__self__
        # Streams of requests come from other services of Headrace, except reflection's.
        is_ours = handler.request_streaming and method.startswith("/headrace.")

        def decode(data: bytes) -> Message:
            if not is_ours and too_many_fields(data, message.DESCRIPTOR):
                raise _too_many_fields()
            try:
                return cast("Message", message.FromString(data))
            except DecodeError as error:
                raise malformed(error) from error

        async def read_one(context: Any) -> Message:
            data = await self._reads.run(_only(context))
            if len(data) <= _MAX_SMALL_BYTES:
                return decode(data)
            await self._large.enter(len(data))
            # One request in each iteration of the event loop, so that other calls are served, too.
            async with self._decoding:
                await asyncio.sleep(0)
                return decode(data)

        async def read_health(context: Any) -> Message:
            data = await self._health_reads.run(_only(context))
            if len(data) > _MAX_HEALTH_BYTES:
                raise exhausted("TOO_LARGE", f"send at most {_MAX_HEALTH_BYTES} bytes")
            return decode(data)

        read = read_health if is_health(method) else read_one

        async def read_or_count(context: Any) -> Message:
            try:
                return await read(context)
            except ServiceError as error:
                self._meter.refused(error)
                raise

        return over_bytes(handler, decode, read_or_count)


def _too_many_fields() -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT,
        "TOO_MANY_FIELDS",
        f"a request has at most {MAX_FIELDS} fields, those of messages in it counted;"
        " send fewer messages or entries",
    )


async def _only(context: Any) -> bytes:
    """The request of a call with one request."""
    data = await context.read()
    if data is grpc.aio.EOF:
        raise malformed("the call carries no message")
    return cast("bytes", data)


def release_request() -> None:
    """Releases the bytes of this task's request, of which the handler keeps no part."""
    if (held := _held.get()) is not None:
        held.release()


class LargeRequests:
    """Admits large requests to decoding, in order of arrival."""

    def __init__(self, max_bytes: int, max_waiting_bytes: int) -> None:
        """max_bytes bounds admitted requests (one is always admitted), max_waiting_bytes others."""
        self._max_bytes = max_bytes
        self._max_waiting_bytes = max_waiting_bytes
        # The number of bytes of each waiting request, by the future that admits the request.
        self._waiting: dict[asyncio.Future[None], int] = {}
        self.num_bytes = 0
        self.num_waiting_bytes = 0

    async def enter(self, num_bytes: int) -> None:
        """Waits until a request is admitted, for this task.

        `release_request` in the task or the task's end releases the request.

        Raises:
            ServiceError: RESOURCE_EXHAUSTED, when too much waits already.
        """
        await self._enter(num_bytes)
        held = _Held(self, num_bytes)
        _held.set(held)
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        task.add_done_callback(lambda _: held.release())

    async def _enter(self, num_bytes: int) -> None:
        if not self._waiting and self._has_room(num_bytes):
            self.num_bytes += num_bytes
            return
        if self.num_waiting_bytes + num_bytes > self._max_waiting_bytes:
            raise exhausted("TOO_MANY_REQUESTS", "too many large requests wait to be read", 1.0)
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = num_bytes
        self.num_waiting_bytes += num_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self.num_waiting_bytes -= self._waiting.pop(turn, 0)
            else:
                self.num_bytes -= num_bytes
            self._admit()
            raise

    def leave(self, num_bytes: int) -> None:
        """Releases an admitted request."""
        self.num_bytes -= num_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            turn, num_bytes = next(iter(self._waiting.items()))
            # A task that was cancelled in this iteration of the loop has not run since.
            if not (turn.cancelled() or self._has_room(num_bytes)):
                return
            del self._waiting[turn]
            self.num_waiting_bytes -= num_bytes
            if not turn.cancelled():
                self.num_bytes += num_bytes
                turn.set_result(None)

    def _has_room(self, num_bytes: int) -> bool:
        return not self.num_bytes or self.num_bytes + num_bytes <= self._max_bytes


class _Held:
    """The bytes of one admitted request; releasing them twice releases them once."""

    def __init__(self, owner: LargeRequests, num_bytes: int) -> None:
        self._owner = owner
        self._num_bytes = num_bytes

    def release(self) -> None:
        self._owner.leave(self._num_bytes)
        self._num_bytes = 0
