"""A TCP proxy in front of each service, whose connections can be cut and held.

A proxy listens on one port for good; what is behind the port may die, and come back elsewhere.
"""

import asyncio
from typing import Self


class Trap:
    """Holds a connection from the moment that a request with the marker passes by.

    holds_answers: the request arrives, and what comes back is held. Otherwise the request itself is
    held, and all that follows it. What is held when its sender dies still arrives at the release.
    """

    def __init__(self, proxy: "Proxy", marker: bytes, *, holds_answers: bool) -> None:
        self.sprung = asyncio.Event()
        self._proxy = proxy
        self._marker = marker
        self._holds_answers = holds_answers
        self._ends: list[_End] = []
        proxy.traps.append(self)

    def __str__(self) -> str:
        return f"the trap for {self._marker!r} at {self._proxy.name}"

    @property
    def is_given_up(self) -> bool:
        """Whether the sender of something that is held has closed the connection."""
        return any(end.is_lost for end in self._ends)

    def look(self, near: "_End", data: bytes) -> "_End | None":
        """The end to hold because of data that a client sends."""
        if self._marker not in data:
            return None
        held = near.other if self._holds_answers else near
        if held is not None:
            self._ends.append(held)
            self.sprung.set()
        return held

    def disarm(self) -> None:
        """Holds no other connection from now on."""
        if self in self._proxy.traps:
            self._proxy.traps.remove(self)

    def release(self) -> None:
        """What is held goes on, and nothing is held any more."""
        self.disarm()
        for end in self._ends:
            end.release()


class _End(asyncio.Protocol):
    """One end of a connection: passes what it reads on to the other end."""

    def __init__(self, proxy: "Proxy", *, is_near: bool) -> None:
        self._proxy = proxy
        self._is_near = is_near
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None
        self._is_peer_full = False
        self._is_held = False
        self.is_lost = False
        self._kept: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._proxy.ends.add(self)
        self.set_reading()
        if self._is_near:
            self._proxy.connect(self)

    def data_received(self, data: bytes) -> None:
        if self._is_near:
            for trap in self._proxy.traps:
                if (end := trap.look(self, data)) is not None:
                    end._is_held = True
        if self._is_held:
            self._kept.append(data)
        else:
            self._pass_on(data)

    def release(self) -> None:
        """Passes on what was held, and the end of the connection if that has come."""
        self._is_held = False
        self._pass_on(b"".join(self._kept))
        self._kept.clear()
        if self.is_lost:
            self._close_other()

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other._is_peer_full = True
            self.other.set_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other._is_peer_full = False
            self.other.set_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._proxy.ends.discard(self)
        self.is_lost = True
        if not self._is_held:
            self._close_other()

    def _pass_on(self, data: bytes) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def _close_other(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.close()

    def set_reading(self) -> None:
        """Reads only while somebody takes what is read."""
        if self.transport is None or self.transport.is_closing():
            return
        if self._proxy.is_blackhole or self._is_peer_full or self.other is None:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


class Proxy:
    """Passes connections on to `upstream`, a unix socket or "host:port"."""

    def __init__(self, name: str, upstream: str = "") -> None:
        self.name = name
        self.upstream = upstream
        self.is_blackhole = False
        self.is_refusing = False
        self.ends: set[_End] = set()
        self.traps: list[Trap] = []
        self._server: asyncio.Server | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self, is_near=True), "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._connecting:
            task.cancel()
        self.reset()
        await self._server.wait_closed()

    @property
    def address(self) -> str:
        """Where to connect to instead of the service."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def set_blackhole(self, is_blackhole: bool) -> None:
        """While true, connections stay open and no byte passes."""
        self.is_blackhole = is_blackhole
        for end in tuple(self.ends):
            end.set_reading()

    def reset(self) -> None:
        """Breaks every connection."""
        for end in tuple(self.ends):
            _abort(end)

    def trap(self, marker: str, *, holds_answers: bool = False) -> Trap:
        """A new trap; armed until it is released."""
        return Trap(self, marker.encode(), holds_answers=holds_answers)

    def connect(self, near: _End) -> None:
        """Connects a connection that has come in to the service."""
        task = asyncio.get_running_loop().create_task(self._connect(near))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, near: _End) -> None:
        loop, far = asyncio.get_running_loop(), _End(self, is_near=False)
        try:
            if self.is_refusing:
                raise ConnectionRefusedError
            if self.upstream.startswith("unix:"):
                path = self.upstream.removeprefix("unix:")
                await loop.create_unix_connection(lambda: far, path)
            else:
                host, _, port = self.upstream.rpartition(":")
                await loop.create_connection(lambda: far, host or "127.0.0.1", int(port or 1))
        except OSError:
            _abort(near)
            return
        near.other, far.other = far, near
        if near not in self.ends:  # gone in the meantime
            _abort(far)
        near.set_reading()
        far.set_reading()


def _abort(end: _End) -> None:
    if end.transport is not None:
        end.transport.abort()
