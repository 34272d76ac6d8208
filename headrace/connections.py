"""The routers that a client may talk to, and what their failures are called."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from headrace.service.channels import (
    WANTS_TLS,
    ChannelConfig,
    connect_failure,
    has_never_connected,
    open_channel,
    speaks_tls,
)
from headrace.service.errors import ServiceError, from_rpc_error
from headrace.v1 import inference_pb2_grpc

UNREACHABLE = "UNREACHABLE"
CANCELLED = "CANCELLED"

# A router that is gone without a word answers no attempt to connect; there may be others.
_CONNECT_TIMEOUT_S = 10.0
_CONNECTING = {grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING}


class RouterChannel:
    """A router's address and channel; the channel is opened at the first call."""

    def __init__(self, address: str, config: ChannelConfig | None, tls_name: str = "") -> None:
        self.address = address
        self._config = config
        self._tls_name = tls_name
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    @property
    def stub(self) -> Any:
        """What calls are made with."""
        if self._channel is None:
            self._channel = open_channel(self.address, self._config, tls_name=self._tls_name)
            self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        return self._stub

    async def connect(self) -> None:
        """Waits while a connection is being made; UnreachableError when that takes too long.

        A connection that was refused is for the next call to report.
        """
        assert self.stub is not None
        channel = self._channel
        assert channel is not None, "opened with the stub"
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                while (state := channel.get_state(try_to_connect=True)) in _CONNECTING:
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            text = f"no connection to {self.address} within {_CONNECT_TIMEOUT_S:g} s"
            raise UnreachableError(text, has_connected=False) from None

    async def aclose(self) -> None:
        """Closes the channel; calls in progress are cancelled."""
        if self._channel is not None:
            await self._channel.close()

    @contextlib.asynccontextmanager
    async def errors(self) -> AsyncIterator[None]:
        """Turns what gRPC raises into ServiceError; UNREACHABLE where no router has answered."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            mapped = from_rpc_error(error)
            raise (await self._unreachable(mapped) if _is_of_the_way(mapped) else mapped) from error
        except asyncio.CancelledError:
            # grpc.aio raises this also when the server ends a call as CANCELLED.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            text = "the call was cancelled by the server or on the way"
            raise ServiceError(grpc.StatusCode.CANCELLED, CANCELLED, text) from None

    async def _unreachable(self, error: ServiceError) -> "UnreachableError":
        why = connect_failure(error.message)
        is_tls = self._config is not None and self._config.is_tls
        if "Socket closed" in why and is_tls:
            why += "; the server may want a client certificate, a valid one of its authority"
        elif "Socket closed" in why and await speaks_tls(self.address):
            why = WANTS_TLS
        text = f"cannot reach a Headrace router at {self.address}: {why}"
        has_connected = why != WANTS_TLS and not has_never_connected(error.message)
        return UnreachableError(text, has_connected=has_connected)


class UnreachableError(ServiceError):
    """The connection failed, at its start or in the middle of a call."""

    def __init__(self, message: str, *, has_connected: bool) -> None:
        """has_connected: the request may have arrived."""
        super().__init__(grpc.StatusCode.UNAVAILABLE, UNREACHABLE, message)
        self.has_connected = has_connected


def _is_of_the_way(error: ServiceError) -> bool:
    """Whether the status is gRPC's or a proxy's own: it has no reason of Headrace."""
    if error.reason == grpc.StatusCode.UNAVAILABLE.name:
        return True
    # A service's own INTERNAL has the same reason, but not this text.
    return error.code is grpc.StatusCode.INTERNAL and "RST_STREAM" in error.message


class Routers:
    """Several routers, of which one is used until it fails."""

    def __init__(self, target: str, config: ChannelConfig | None, tls_name: str = "") -> None:
        """target: addresses, separated by commas. tls_name: see open_channel."""
        addresses = [address.strip() for address in target.split(",")]
        self._routers = [RouterChannel(one, config, tls_name) for one in addresses if one]
        if not self._routers:
            raise ValueError(f"target: must be HOST:PORT or unix:PATH, or several, is {target!r}")
        self._current = 0
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._routers)

    @property
    def current(self) -> RouterChannel:
        """The router to call; ServiceError when the client is closed."""
        if self.is_closed:
            raise ServiceError(grpc.StatusCode.CANCELLED, "CLOSED", "this client is closed")
        return self._routers[self._current]

    def leave(self, failed: RouterChannel) -> None:
        """Uses the next router, unless another caller has left this one already."""
        if self._routers[self._current] is failed:
            self._current = (self._current + 1) % len(self._routers)

    async def aclose(self) -> None:
        """Closes all channels."""
        self.is_closed = True
        for router in self._routers:
            await router.aclose()
