"""What a method's handler becomes, without gRPC around it."""

import asyncio
import weakref

import grpc
import grpc.aio
import pytest

from headrace.service.handlers import over_bytes


class Context:
    """Gives two requests, and keeps what is written."""

    def __init__(self):
        self.written = []
        self._requests = [b"1", b"2"]

    async def read(self):
        return self._requests.pop() if self._requests else grpc.aio.EOF

    async def write(self, message):
        self.written.append(message)


class Message:
    pass


async def read(_context):
    return Message()


async def unary(request, context):
    return request


async def yielding(request, context):
    yield request


async def writing(request, context):
    await context.write(request)


async def test_each_kind_of_handler_is_called_with_decoded_requests():
    context = Context()
    made = over_bytes(grpc.unary_unary_rpc_method_handler(unary, None, repr), int, read)
    assert (await made.stream_unary(None, context)).startswith("<")
    for behaviour in (yielding, writing):
        made = over_bytes(grpc.unary_stream_rpc_method_handler(behaviour, None, repr), int, read)
        await made.stream_stream(None, context)
    assert [type(message) for message in context.written] == [Message] * 2

    async def total(requests, context):
        return sum([number async for number in requests])

    made = over_bytes(grpc.stream_unary_rpc_method_handler(total, None, repr), int, read)
    assert await made.stream_unary(None, context) == "3"


@pytest.mark.parametrize("has_response_stream", [False, True])
async def test_a_request_that_its_handler_drops_is_nowhere_else(has_response_stream):
    dropped = asyncio.Event()
    last = []

    async def drop(request, _context):
        last.append(weakref.ref(request))
        del request
        dropped.set()
        await asyncio.Event().wait()

    if has_response_stream:
        made = over_bytes(grpc.unary_stream_rpc_method_handler(drop), int, read)
        task = asyncio.create_task(made.stream_stream(None, Context()))
    else:
        made = over_bytes(grpc.unary_unary_rpc_method_handler(drop), int, read)
        task = asyncio.create_task(made.stream_unary(None, Context()))
    await dropped.wait()
    assert last[0]() is None
    task.cancel()
