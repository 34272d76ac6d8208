"""A proxy before a unix socket, which can hold back what it should forward."""

import asyncio
import contextlib
from pathlib import Path


class HoldingProxy:
    """Forwards bytes in both directions while it is open."""

    def __init__(self, target: str, path: Path) -> None:
        self._target = target
        self._path = path
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "HoldingProxy":
        self._server = await asyncio.start_unix_server(self._accept, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def hold(self) -> None:
        """Forwards nothing until `release`; connections stay."""
        self._open.clear()

    def release(self) -> None:
        """Forwards what was held back, and all that follows."""
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError):
            back, forth = await asyncio.open_unix_connection(self._target)
            try:
                await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))
            finally:
                forth.close()
                writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
