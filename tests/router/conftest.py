"""Fixtures of the router's tests; after each, no task is left."""

import asyncio

import pytest

from tests.router.stack import running_stack


@pytest.fixture(autouse=True)
async def _no_task_is_left():
    before = asyncio.all_tasks()
    yield
    async with asyncio.timeout(60):
        while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.wait(left, timeout=0.05)


@pytest.fixture
async def stack():
    """A router with one fake scheduler that answers at once; afterwards nothing may be left."""
    async with running_stack() as running:
        yield running
