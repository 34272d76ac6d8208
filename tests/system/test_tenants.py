"""Router and scheduler over real gRPC: what tenants learn of each other."""

import contextlib

import pytest

from tests.router.fake_scheduler import MODEL
from tests.router.stack import running_stack
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import running_scheduler

PROMPT = list(range(20, 53))
NUM_CACHED = 32  # all whole blocks of four tokens, but for the last token


@contextlib.asynccontextmanager
async def running(**settings):
    """A router over a real scheduler, whose worker runs no model."""
    worker = FakeGpuWorker(model=MODEL)
    await worker.start()
    async with running_scheduler([worker]) as scheduler:
        await scheduler.ready()
        async with running_stack(schedulers=[scheduler], **settings) as stack:
            yield stack


async def cached_tokens(stack, tenant, cache_salt=""):
    """usage.cached_tokens of the prompt, asked for by a tenant."""
    messages = await stack.answer(
        token_ids={"ids": PROMPT}, tenant=tenant, cache_salt=cache_salt, sampling={"max_tokens": 2}
    )
    return messages[-1].usage.cached_tokens


async def test_a_tenant_cannot_tell_that_another_one_sent_the_same_prompt():
    async with running() as stack:
        assert await cached_tokens(stack, "a") == 0
        assert await cached_tokens(stack, "b") == 0
        assert await cached_tokens(stack, "") == 0
        assert await cached_tokens(stack, "a") == NUM_CACHED
        assert await cached_tokens(stack, "b") == NUM_CACHED


@pytest.mark.parametrize(
    ("tenant", "cache_salt"),
    [("", "a"), ("b", "1:a"), ("b", ":a"), ("1:", "a"), ("1", ":a"), ("", "1:a"), ("ax", "")],
)
async def test_no_salt_reaches_the_prefixes_of_another_tenant(tenant, cache_salt):
    async with running() as stack:
        assert await cached_tokens(stack, "a") == 0
        assert await cached_tokens(stack, "a", "x") == 0
        assert await cached_tokens(stack, tenant, cache_salt) == 0


async def test_the_salt_divides_a_tenant_s_own_prefixes():
    async with running() as stack:
        assert await cached_tokens(stack, "a", "x") == 0
        assert await cached_tokens(stack, "a", "y") == 0
        assert await cached_tokens(stack, "a", "x") == NUM_CACHED


async def test_tenants_share_prefixes_where_the_router_is_set_to():
    async with running(share_prefix_cache_across_tenants=True) as stack:
        assert await cached_tokens(stack, "a") == 0
        assert await cached_tokens(stack, "b") == NUM_CACHED
        assert await cached_tokens(stack, "b", "salt") == 0
        assert await cached_tokens(stack, "c", "salt") == NUM_CACHED


@pytest.mark.parametrize("is_shared", [False, True])
async def test_placement_goes_by_the_same_salt(is_shared):
    async with running(share_prefix_cache_across_tenants=is_shared) as stack:
        prefixes, submit = [], stack.router._dispatcher.enqueue

        def note(completion):
            prefixes.append(completion.request.prefix)
            submit(completion)

        stack.router._dispatcher.enqueue = note
        prompt = list(range(20, 200))
        for tenant in ("a", "b"):
            await stack.answer(token_ids={"ids": prompt}, tenant=tenant, sampling={"max_tokens": 1})
        assert prefixes[0]
        assert (prefixes[0] == prefixes[1]) is is_shared
