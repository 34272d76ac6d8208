"""Reading prompts: inline when short, beside the event loop when long, bounded in any case."""

import asyncio
import contextlib
import statistics
import time

import numpy as np
import psutil
import pytest
from grpc import StatusCode

from headrace.service.errors import ServiceError
from router.prompts import ChatPrompt, PromptReader, TextPrompt, TokenPrompt
from router.text.chat import ChatTemplate
from router.text.tokenizer import ModelText, load_model_text
from tests.router.tiny_models import byte_level_model

MODEL = byte_level_model()


@contextlib.contextmanager
def reading(model=MODEL, *, num_processes=1, max_waiting_chars=100_000, **settings):
    reader = PromptReader(
        {"m": model},
        num_processes=num_processes,
        max_waiting_chars=max_waiting_chars,
        **settings,
    )
    try:
        yield reader
        assert reader.num_waiting_chars == 0
    finally:
        reader.close()


@pytest.fixture
def reader():
    with reading() as reader:
        yield reader


async def read(reader, prompt, check=lambda _: None, *, echo=False, keep_special_tokens=False):
    return await reader.read(
        "m",
        prompt,
        check,
        lambda: 1_000,
        echo=echo,
        keep_special_tokens=keep_special_tokens,
    )


@contextlib.asynccontextmanager
async def busy(lane):
    """Its only slot is taken until the block is left."""
    async with lane._slots:
        yield


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


@pytest.mark.parametrize("is_known", [True, False])
async def test_control_tokens_in_messages_are_text_unless_they_are_let_through(is_known):
    [end] = MODEL.tokenizer.encode("<|end|>", add_special_tokens=False)
    model = byte_level_model()
    # A known template is rendered in this process, another one in a child.
    model.chat_template.is_known = is_known
    for lets_through, num_ends in ((False, 1), (True, 2)):
        with reading(model, has_spelled_control_tokens=lets_through) as reader:
            token_ids, shown = await read(
                reader, chat("a<|end|>b"), echo=True, keep_special_tokens=True
            )
        assert np.count_nonzero(token_ids == end) == num_ends
        assert shown == "<|user|>a<|end|>b<|end|><|assistant|>"


async def test_the_prompt_of_a_text_request_may_spell_control_tokens(reader):
    token_ids, _ = await read(reader, TextPrompt("a<|end|>"))
    assert (
        token_ids.tolist()[-1:]
        == MODEL.tokenizer.encode("<|end|>", add_special_tokens=False).tolist()
    )


async def test_a_child_that_died_between_two_prompts_costs_none_of_them(reader):
    long = TextPrompt("h" * 30_000)
    await read(reader, long)
    server = psutil.Process(reader._lanes.processes._pid)
    children = server.children()
    for process in children:
        process.kill()
    psutil.wait_procs(children, timeout=30)
    assert len((await read(reader, long))[0]) == 30_000
    children = server.children()
    server.kill()
    psutil.wait_procs([server, *children], timeout=30)
    assert len((await read(reader, long))[0]) == 30_000


async def test_many_bad_words_are_tokenized_beside_the_event_loop(reader):
    async with busy(reader._lanes.short):
        waiting = asyncio.create_task(reader.bad_words("m", ["hello" * 50] * 64))
        await asyncio.sleep(0)
        assert await reader.bad_words("m", ["hello"])
        assert not waiting.done()
    assert len(await waiting) == 64


async def test_messages_that_do_not_fit_the_template_are_named(reader):
    with pytest.raises(ServiceError, match="no such role: wizard") as caught:
        await read(reader, chat("x", role="wizard"))
    assert caught.value.field == "chat.messages"


async def test_a_prompt_that_comes_to_nothing_is_refused():
    with (
        reading(ModelText(MODEL.tokenizer, ChatTemplate("", {}))) as reader,
        pytest.raises(ServiceError, match="gives no tokens"),
    ):
        await read(reader, chat("x"))


async def test_more_text_than_may_wait_is_refused_and_room_comes_back(reader):
    async with busy(reader._lanes.short):
        waiting = [asyncio.create_task(read(reader, TextPrompt("h" * 40_000))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ServiceError) as caught:
            await read(reader, TextPrompt("h" * 30_000))
        assert (caught.value.reason, caught.value.retry_after_s) == ("TOO_MANY_PROMPTS", 1.0)
        assert len((await read(reader, TextPrompt("h" * 100)))[0]) == 100
    assert [len(token_ids) for token_ids, _ in await asyncio.gather(*waiting)] == [40_000] * 2
    assert len((await read(reader, TextPrompt("h" * 30_000)))[0]) == 30_000


async def test_big_prompts_are_waited_for_by_no_other(reader):
    big = "hello " * 16_000
    async with busy(reader._lanes.big):
        waiting = asyncio.create_task(read(reader, TextPrompt(big)))
        await asyncio.sleep(0)
        with pytest.raises(ServiceError, match="too many long prompts"):
            await read(reader, TextPrompt(big))
        assert len((await read(reader, TextPrompt("h" * 30_000)))[0]) == 30_000
        assert len((await read(reader, chat("h" * 30_000)))[0]) > 30_000
    assert len((await waiting)[0]) == 32_000


async def test_what_is_hopeless_is_refused_before_it_waits(reader):
    def check(num_tokens):
        if num_tokens > 1_000:
            raise ServiceError(StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "too long")

    big = "hello " * 16_000
    async with busy(reader._lanes.big):
        for prompt in (TextPrompt(big), chat(big), TokenPrompt(np.ones(32_000, np.int32))):
            with pytest.raises(ServiceError, match="too long"):
                await read(reader, prompt, check, echo=True)


async def test_the_number_checked_is_not_above_what_is_read(reader):
    checked = []
    for prompt in (TextPrompt("hello <|end|>"), chat("hello", "wo"), TextPrompt("hellé" * 900)):
        token_ids, _ = await read(reader, prompt, checked.append)
        assert 1 == checked[0] <= checked[1] <= len(token_ids)
        checked.clear()


async def test_neither_lock_nor_event_loop_is_held_while_megabytes_are_read(model_path):
    with reading(
        load_model_text(model_path), num_processes=2, max_waiting_chars=32_000_000
    ) as reader:
        text = "The quick brown fox jumps over the lazy dog; then 12 things happened. " * 10_000
        big = [asyncio.create_task(read(reader, TextPrompt(text))) for _ in range(3)]
        waits = []
        first = time.perf_counter()
        while not all(task.done() for task in big):
            began = time.perf_counter()
            await asyncio.sleep(0.002)
            await read(reader, TextPrompt("hello world"))
            await read(reader, TextPrompt("hello world" * 1_000))
            waits.append(time.perf_counter() - began)
        # Were one of the big ones waited for, that would be a third of the time or more.
        assert statistics.median(waits) < (time.perf_counter() - first) / 5
        assert len({len((await task)[0]) for task in big}) == 1
