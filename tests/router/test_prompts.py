"""Reading prompts: inline when short, beside the event loop when long, bounded in any case."""

import asyncio
import threading

import numpy as np
import pytest

from headrace.service.errors import ServiceError
from router.prompts import ChatPrompt, PromptReader, TextPrompt, TokenPrompt
from router.text.chat import ChatTemplate
from router.text.tokenizer import ModelText
from tests.router.tiny_models import byte_level_model

MODEL = byte_level_model()


@pytest.fixture
def reader():
    reader = PromptReader(num_threads=1, max_waiting_chars=10_000)
    yield reader
    assert reader._num_waiting_chars == 0
    reader.close()


async def read(reader, prompt, *, model=MODEL, echo=False, keep_special_tokens=False):
    return await reader.read(model, prompt, echo=echo, keep_special_tokens=keep_special_tokens)


def chat(*contents, role="user"):
    return ChatPrompt([{"role": role, "content": content} for content in contents], True)


async def test_long_and_short_prompts_have_the_same_tokens(reader):
    short, _ = await read(reader, TextPrompt("hello world"))
    long, _ = await read(reader, TextPrompt("hello world" * 300))
    assert long.tolist() == short.tolist() * 300


async def test_an_echo_is_the_text_as_it_was_sent_or_what_the_tokens_spell(reader):
    assert (await read(reader, TextPrompt("hello"), echo=True))[1] == "hello"
    tokens = TokenPrompt(MODEL.tokenizer.encode("hello<|end|>", add_special_tokens=False))
    assert (await read(reader, tokens, echo=True))[1] == "hello"
    assert (await read(reader, tokens, echo=True, keep_special_tokens=True))[1] == "hello<|end|>"
    assert (await read(reader, tokens))[1] == ""


async def test_token_ids_are_used_as_they_are(reader):
    token_ids = np.array([3, 1, 4], np.int32)
    assert (await read(reader, TokenPrompt(token_ids)))[0] is token_ids


async def test_messages_that_do_not_fit_the_template_are_named(reader):
    with pytest.raises(ServiceError, match="no such role: wizard") as caught:
        await read(reader, chat("x", role="wizard"))
    assert caught.value.field == "chat.messages"


async def test_a_prompt_that_comes_to_nothing_is_refused(reader):
    model = ModelText(MODEL.tokenizer, ChatTemplate("", {}))
    with pytest.raises(ServiceError, match="gives no tokens"):
        await read(reader, chat("x"), model=model)


async def test_more_text_than_may_wait_is_refused_and_room_comes_back(reader):
    is_busy, go_on = threading.Event(), threading.Event()

    def be_busy():
        is_busy.set()
        go_on.wait()

    reader._executor.submit(be_busy)
    is_busy.wait()
    waiting = asyncio.create_task(read(reader, TextPrompt("h" * 6_000)))
    await asyncio.sleep(0)
    with pytest.raises(ServiceError) as caught:
        await read(reader, TextPrompt("h" * 6_000))
    assert (caught.value.reason, caught.value.retry_after_s) == ("TOO_MANY_PROMPTS", 1.0)
    assert len((await read(reader, TextPrompt("h" * 100)))[0]) == 100
    go_on.set()
    assert len((await waiting)[0]) == 6_000
    assert len((await read(reader, TextPrompt("h" * 6_000)))[0]) == 6_000
