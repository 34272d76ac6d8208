"""A real Valkey for each test that asks, and the rule that no key lives for ever."""

import pytest
import redis.asyncio

from headrace.status.embedded import EmbeddedStore


@pytest.fixture
async def embedded():
    """A running server; afterwards, no key may lack a TTL."""
    async with EmbeddedStore() as server:
        yield server
        client = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
        immortal = [key async for key in client.scan_iter() if await client.pttl(key) < 0]
        await client.aclose()
    assert not immortal, f"keys without TTL: {immortal}"
