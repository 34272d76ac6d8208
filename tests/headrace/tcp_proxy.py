"""A TCP proxy in the test's own loop, whose connections a test can cut."""

import asyncio
import contextlib


class TcpProxy:
    """`async with` listens on a free port and forwards to `target`, "host:port"."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.num_connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> "TcpProxy":
        await self.listen(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()

    async def listen(self, port: int | None = None) -> None:
        """Takes connections, after `refuse` on the same port."""
        port = int(self.address.rpartition(":")[2]) if port is None else port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def refuse(self) -> None:
        """Cuts all connections and refuses new ones."""
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Resets all connections; new ones are taken."""
        for writer in list(self._writers):
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        host, _, port = self.target.rpartition(":")
        try:
            there_reader, there = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there}
        for source, sink in ((reader, there), (there_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
        self._writers.discard(writer)
