"""A service of another version of Headrace, as far as its messages tell.

A proxy in front of a service of this version reads and writes every message by the protos of an
earlier release: fields that those do not have are dropped, in both directions, as a service with
the earlier stubs would neither send nor read them.
"""

import asyncio
import contextlib
from pathlib import Path

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

DATA = Path(__file__).parent.parent / "data" / "protos"


def release(version):
    """The descriptors of a release's protos."""
    pool = descriptor_pool.DescriptorPool()
    files = descriptor_pb2.FileDescriptorSet.FromString((DATA / f"{version}.binpb").read_bytes())
    for file in files.file:
        pool.Add(file)
    return pool


class OtherVersion(grpc.GenericRpcHandler):
    """Passes calls on to `target`, through the messages of a release."""

    def __init__(self, target, pool, spoil=lambda data: data):
        """spoil changes the bytes of each message in addition, e.g. adds fields that are newer."""
        self._target, self._pool, self._spoil = target, pool, spoil
        self.num_messages = 0

    async def __aenter__(self):
        self._channel = grpc.aio.insecure_channel(self._target)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers([self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_):
        await self._server.stop(0)
        await self._channel.close()

    def service(self, details):
        service, _, name = details.method.removeprefix("/").partition("/")
        method = self._pool.FindServiceByName(service).FindMethodByName(name)
        through = [self._through(kind) for kind in (method.input_type, method.output_type)]

        async def behaviour(messages, context):
            await self._pass(details, messages, context, *through)

        return grpc.stream_stream_rpc_method_handler(behaviour)

    def _through(self, kind):
        message_class = message_factory.GetMessageClass(kind)

        def translate(data):
            message = message_class.FromString(data)
            message.DiscardUnknownFields()
            self.num_messages += 1
            return self._spoil(message.SerializeToString())

        return translate

    async def _pass(self, details, messages, context, to_request, to_response):
        sent = details.invocation_metadata or ()
        metadata = [(k, v) for k, v in sent if k.startswith(("x-headrace-", "authorization"))]
        call = self._channel.stream_stream(details.method)(metadata=metadata)

        async def forward():
            async for data in messages:
                await call.write(to_request(data))
            await call.done_writing()

        forwarding = asyncio.create_task(forward())
        try:
            await context.send_initial_metadata(tuple(await call.initial_metadata()))
            async for data in call:
                await context.write(to_response(data))
        except grpc.aio.AioRpcError as error:
            trailing = tuple(error.trailing_metadata() or ())
            await context.abort(error.code(), error.details(), trailing)
        finally:
            call.cancel()
            forwarding.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await forwarding


def with_unknown_fields(data):
    """A message to which a newer version has added a number and a text."""
    return data + b"\xd8\xb6\x3a\x2a" + b"\xe2\xb6\x3a\x05later"
