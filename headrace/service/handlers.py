"""Converts gRPC method handlers of every kind to one kind: a coroutine over raw messages.

Handlers are registered in any of gRPC's four kinds, as coroutines or async generators. gRPC
decodes the request of a unary method before any code of the service runs. `over_bytes` converts all
kinds to one, so that what surrounds a call is written once, runs before decoding, and sees every
error. Each such layer is one coroutine of every call.
"""

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

# Called with gRPC's iterator of messages, which stays unused because it holds its last message to
# the end of the call, and with the call's context.
Behaviour = Callable[[Any, Any], Awaitable[Any]]
Around = Callable[[Behaviour, Any, Any], Awaitable[Any]]


def make_handler(behaviour: Behaviour, *, has_response_stream: bool, serialize: Any = None) -> Any:
    """A gRPC method handler that reads no message until `behaviour` asks for one.

    Args:
        behaviour: a coroutine function that reads the bytes of requests from the call's context;
            returns the response's bytes, or writes a stream of responses to the context.
        has_response_stream: whether `behaviour` writes a stream.
        serialize: the serializer of the responses.
    """
    kind = "stream_stream" if has_response_stream else "stream_unary"
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(behaviour, request_deserializer=None, response_serializer=serialize)


def over_bytes(
    handler: Any, decode: Callable[[bytes], Any], read_one: Callable[[Any], Awaitable[Any]]
) -> Any:
    """The registered handler as a handler of `make_handler`.

    Args:
        handler: as it was registered.
        decode: one message of a request stream.
        read_one: the message of a method that takes one, from the call's context.
    """
    kind = f"{_arity(handler.request_streaming)}_{_arity(handler.response_streaming)}"
    behaviour, serialize = getattr(handler, kind), handler.response_serializer
    is_generator = inspect.isasyncgenfunction(behaviour)

    async def call(_messages: Any, context: Any) -> Any:
        is_stream = handler.request_streaming
        request = _Decoded(context, decode) if is_stream else await read_one(context)
        responses = behaviour(request, context)
        # The handler alone references its request, and can drop the request before the call ends.
        del request
        if not handler.response_streaming:
            return serialize(await responses)
        if not is_generator:
            return await responses
        async with contextlib.aclosing(responses):
            async for response in responses:
                await write(context, response)
        return None

    return make_handler(
        call,
        has_response_stream=handler.response_streaming,
        serialize=serialize if handler.response_streaming else None,
    )


def surround(handler: Any, around: Around) -> Any:
    """A handler of `make_handler` whose calls run as `around(behaviour, messages, context)`.

    behaviour is that of the given handler, and `around` returns the call's response.
    """
    behaviour = handler.stream_stream if handler.response_streaming else handler.stream_unary
    return make_handler(
        functools.partial(around, behaviour),
        has_response_stream=handler.response_streaming,
        serialize=handler.response_serializer,
    )


class HandlerInterceptor(grpc.aio.ServerInterceptor):
    """Replaces each registered handler by a wrapper, which is made at the method's first call."""

    def __init__(self, *wraps: Callable[[Any, str], Any]) -> None:
        """wraps: called in order, each with the handler so far and the method's full name."""
        self._wraps = wraps
        # By method: the registered handler and its wrapper.
        self._made: dict[str, tuple[Any, Any]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        seen, made = self._made.get(method, (None, None))
        if seen is not handler:
            made = functools.reduce(lambda inner, wrap: wrap(inner, method), self._wraps, handler)
            self._made[method] = handler, made
        return made


async def write(context: Any, message: Any) -> None:
    """Sends one message of a stream.

    Raises:
        CallOverError: the call is over. When the caller cancels or the deadline passes during a
            write, a handler may get this error and no cancellation.
    """
    try:
        await context.write(message)
    except grpc.aio.InternalError as error:
        raise CallOverError from error


class CallOverError(asyncio.CancelledError):
    """The call was cancelled or its deadline passed, before gRPC cancelled the handler's task."""


class _Decoded:
    """The messages of a request stream."""

    def __init__(self, context: Any, decode: Callable[[bytes], Any]) -> None:
        self._context = context
        self._decode = decode

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        data = await self._context.read()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        return self._decode(data)


def _arity(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"
