"""Waiting for something outside the event loop to become true."""

import asyncio
from collections.abc import Awaitable, Callable


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_s: float = 60.0) -> None:
    """Returns once `condition` holds; TimeoutError if it never does."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110 there is no event to wait on
            await asyncio.sleep(0.01)


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """The same for a condition that is known at once."""

    async def check() -> bool:
        return condition()

    await eventually(check, timeout_s)
