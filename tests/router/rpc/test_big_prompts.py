"""Megabytes of prompt: refused before they are read where that can be, and in nobody's way."""

import asyncio
import gc
import statistics
import time

import grpc
import pytest

from router.prompts import TextPrompt
from router.text.jobs import Render
from tests.router.fake_scheduler import FakeScheduler, worker
from tests.router.rpc.test_overload import refusal_of, with_slots
from tests.router.stack import running_stack

MAX_BYTES = 4 * 1024 * 1024


async def with_length(stack, max_model_len):
    blocks = {"num_kv_blocks": max_model_len // 16, "num_free_kv_blocks": max_model_len // 16}
    stack.scheduler.set_workers(worker(max_model_len=max_model_len, **blocks))
    await stack.until(lambda: stack.router.pool.reports()[0].max_model_len == max_model_len)


@pytest.fixture
def nothing_is_read(stack, monkeypatch):
    """Whoever waits for a prompt to be tokenized waits for ever."""

    do = stack.services.prompts._do

    async def never(job, *args, **kwargs):
        if isinstance(job, Render):
            return await do(job, *args, **kwargs)
        return await asyncio.Event().wait()

    monkeypatch.setattr(stack.services.prompts, "_do", never)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("name", ["text", "chat.messages", "token_ids.ids"])
async def test_what_no_worker_holds_is_refused_unread_and_at_once(stack, name):
    text = "hello world " * (MAX_BYTES // 12)
    fields = {
        "text": {"text": text},
        "chat.messages": {"chat": {"messages": [{"role": "user", "content": text[:-100]}]}},
        "token_ids.ids": {"token_ids": {"ids": [1] * 1_000_000}, "echo": True},
    }[name]
    error = await refusal_of(stack.generate(**fields))
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, name)
    assert "shorten it" in error.message


async def test_a_tenant_whose_queue_is_full_has_nothing_read(monkeypatch):
    scheduler = FakeScheduler(is_paced=False)
    tenant = {"max_queued_requests": 2}
    async with running_stack(scheduler=scheduler, waiting_allowance=0, tenant=tenant) as stack:
        await with_slots(stack, 1)
        calls = [stack.generate(tenant="a") for _ in range(3)]
        await stack.until(lambda: stack.router.num_queued == 2)
        monkeypatch.setattr(stack.services.prompts, "_do", None)
        bad_words = ["x" * 256] * 64
        error = await refusal_of(
            stack.generate("hello " * 600, tenant="a", sampling={"bad_words": bad_words})
        )
        assert error.reason == "TENANT_QUEUE_FULL"
        scheduler.resume()
        for call in calls:
            await stack.rest(call)


async def test_short_prompts_are_answered_while_the_biggest_are_read(stack):
    await with_length(stack, 500_000)
    # Digits are a token each: too many for the worker, which shows when they are read.
    big = [
        asyncio.create_task(refusal_of(stack.generate("7" * 1_000_000, timeout=100)))
        for _ in range(3)
    ]
    await stack.until(lambda: stack.services.prompts.num_waiting_chars)
    times_to_first_token = []
    first = time.monotonic()
    while not all(task.done() for task in big):
        began = time.monotonic()
        assert await stack.text("hello world", sampling={"max_tokens": 1})
        times_to_first_token.append(time.monotonic() - began)
        await asyncio.sleep(0.002)
    assert {error.field for error in await asyncio.gather(*big)} == {"text"}
    # Were a big one waited for, that would be a third of the time or more.
    assert statistics.median(times_to_first_token) < (time.monotonic() - first) / 5


async def test_a_refused_prompt_is_freed_without_a_garbage_collection(stack):
    gc.collect()
    gc.disable()
    try:
        await refusal_of(stack.generate("hello " * 600_000))
        await stack.until(lambda: stack.is_empty)
        # Not isinstance, which asks every object in the process for its class: some of torch warn.
        assert not [held for held in gc.get_objects() if type(held) is TextPrompt]
    finally:
        gc.enable()
