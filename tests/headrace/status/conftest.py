"""A real Valkey for each test that asks, and the rule that no key lives for ever."""

import pytest
import redis.asyncio

from headrace.status.embedded import EmbeddedStore


async def immortal_keys(client) -> list[str]:
    """The keys of a server that have no TTL."""
    return [key async for key in client.scan_iter() if await client.pttl(key) < 0]


@pytest.fixture
async def embedded():
    """A running server; afterwards, no key may lack a TTL."""
    async with EmbeddedStore() as server:
        yield server
        client = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
        immortal = await immortal_keys(client)
        await client.aclose()
    assert not immortal, f"keys without TTL: {immortal}"


@pytest.fixture
async def client(embedded):
    """The test's own connection to the server."""
    async with redis.asyncio.Redis.from_url(embedded.url, decode_responses=True) as own:
        yield own
