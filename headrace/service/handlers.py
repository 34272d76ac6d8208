"""Wraps a gRPC method handler of any kind, so that an interceptor is written once."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

AroundUnary = Callable[[Callable[[], Awaitable[Any]], Any], Awaitable[Any]]
AroundStream = Callable[[Callable[[], AsyncIterator[Any]], Any], AsyncIterator[Any]]


def wrap_handler(handler: Any, unary: AroundUnary, stream: AroundStream) -> Any:
    """The same handler with `unary` or `stream` around each call.

    `unary(call, context)` surrounds a handler that returns its response (or writes to the
    context itself); `stream(call, context)` surrounds one that yields. Both get a `call` without
    arguments that starts the inner handler. None, for an unknown method, stays None.
    """
    if handler is None:
        return None
    kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
    inner = getattr(handler, kind)

    async def around_unary(request: Any, context: Any) -> Any:
        return await unary(lambda: inner(request, context), context)

    async def around_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in stream(lambda: inner(request, context), context):
            yield message

    around = around_stream if inspect.isasyncgenfunction(inner) else around_unary
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        around,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def write(context: Any, message: Any) -> None:
    """Sends one message of a stream.

    Raises:
        CancelledError: the call is over. A handler that is in the middle of a message when its
            caller leaves, or its time is up, may hear of that by this and nothing else.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


def check_decoding(handler: Any, malformed: Callable[[DecodeError], Exception]) -> Any:
    """The same handler, raising `malformed(why)` for a request that is not its message.

    Without it gRPC answers UNKNOWN before any of our code runs. Streams of requests stay as they
    are: only our own services send them.
    """
    if handler is None or handler.request_streaming:
        return handler
    kind = f"unary_{_arity(handler.response_streaming)}"
    inner, decode = getattr(handler, kind), handler.request_deserializer

    def decode_or_keep(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError as error:
            return error

    def checked(request: Any, context: Any) -> Any:
        if isinstance(request, DecodeError):
            raise malformed(request)
        return inner(request, context)

    async def checked_unary(request: Any, context: Any) -> Any:
        return await checked(request, context)

    async def checked_stream(request: Any, context: Any) -> AsyncIterator[Any]:
        async for message in checked(request, context):
            yield message

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(
        checked_stream if inspect.isasyncgenfunction(inner) else checked_unary,
        request_deserializer=decode_or_keep,
        response_serializer=handler.response_serializer,
    )


def _arity(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
