"""A channel whose certificates are renewed while calls run on it.

gRPC's channels keep the credentials that they were made with. This one is made again when its
files change: calls from then on use the new channel, and earlier ones end on the old channel, which
is closed after the last of them.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from headrace.service.watched import Watched


class RenewedChannel(grpc.aio.Channel):
    """Behaves as the channel that the present files make; used in one event loop."""

    def __init__(
        self,
        credentials: Watched[grpc.ChannelCredentials],
        make: Callable[[grpc.ChannelCredentials], grpc.aio.Channel],
    ) -> None:
        self._credentials = credentials
        self._make = make
        self._used = credentials.get()
        self._channel = make(self._used)
        # Open calls by channel: the present one, and old ones that have any.
        self._calls: dict[grpc.aio.Channel, set[Any]] = {self._channel: set()}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def num_old(self) -> int:
        """Old channels that have calls."""
        return len(self._calls) - 1

    def current(self) -> grpc.aio.Channel:
        """The channel for the next call."""
        found = self._credentials.get()
        if found is not self._used and not self._is_closed:
            old, self._channel = self._channel, self._make(found)
            self._used = found
            self._calls[self._channel] = set()
            self._close_unused(old)
        return self._channel

    def note(self, channel: grpc.aio.Channel, call: Any) -> None:
        """Knows a call until it is over."""
        calls = self._calls[channel]
        calls.add(call)

        def forget(_: Any) -> None:
            calls.discard(call)
            self._close_unused(channel)

        call.add_done_callback(forget)

    def _close_unused(self, channel: grpc.aio.Channel) -> None:
        if channel is self._channel or self._calls.get(channel, True):
            return
        del self._calls[channel]
        closing = asyncio.ensure_future(channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """Closes the channel and those before it; calls in progress are cancelled after grace."""
        self._is_closed = True
        await asyncio.gather(*(channel.close(grace) for channel in self._calls), *self._closing)

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return _Method(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return _Method(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return _Method(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return _Method(self, "stream_stream", arguments, named)


class _Method:
    """A method of a stub: each call goes to the channel of its moment."""

    def __init__(
        self, owner: RenewedChannel, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> None:
        self._owner = owner
        self._make = (kind, arguments, named)
        self._channel: grpc.aio.Channel | None = None
        self._call: Any = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        channel = self._owner.current()
        if channel is not self._channel:
            kind, made_with, named_with = self._make
            self._channel = channel
            self._call = getattr(channel, kind)(*made_with, **named_with)
        call = self._call(*arguments, **named)
        self._owner.note(channel, call)
        return call
