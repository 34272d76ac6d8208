"""Waiting for something outside the event loop to become true."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(
    condition: Callable[[], Awaitable[object]], timeout_s: float = 60.0, *, poll_s: float = 0.01
) -> None:
    """Returns once `condition` holds; TimeoutError if it never does.

    The clock is looked at, too: clients of redis-py swallow some cancellations, and a timeout
    cancels only once.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    async with asyncio.timeout(timeout_s):
        while not await condition():
            if loop.time() > end_s:
                raise TimeoutError
            await asyncio.sleep(poll_s)


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """The same for a condition that is known at once."""

    async def check() -> object:
        return condition()

    await eventually(check, timeout_s)
