"""Models whose template or tokenizer is hostile: their errors are the caller's; others go on."""

import asyncio
import logging

import grpc
import pytest

from headrace.service.errors import ServiceError, from_rpc_error
from router.prompts import PromptReader
from router.rpc import wire
from router.text.completion import CompletionText
from router.text.errors import ChatTemplateError
from router.text.jobs import Encode, perform
from tests.router.fake_scheduler import MODEL
from tests.router.stack import running_stack
from tests.router.test_prompts import chat, read, reading
from tests.router.text import hostile
from tests.router.tiny_models import byte_level_model


async def error_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return from_rpc_error(caught.value)


def boom(content="boom"):
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("name", hostile.TEMPLATES)
async def test_what_a_template_does_is_its_error_to_the_caller(name):
    with reading(hostile.model_with_template(hostile.template(name))) as reader:
        if name not in {"infinite list", "nothing"}:
            with pytest.raises(ServiceError, match="chat template") as caught:
                await read(reader, chat("boom"))
            assert (caught.value.reason, caught.value.field) == ("INVALID_FIELD", "chat.messages")
        assert len((await read(reader, chat("hello")))[0])


async def test_a_broken_template_stops_the_start():
    with (
        reading(hostile.model_with_template("{% for %}")) as reader,
        pytest.raises(ChatTemplateError, match="is broken"),
    ):
        await reader.start()


async def test_nothing_in_a_template_is_computed_when_it_is_compiled():
    with reading(hostile.model_with_template(hostile.TEMPLATES["constant power"])) as reader:
        await reader.start()


async def test_a_tokenizer_that_panics_or_never_ends_fails_the_call_and_says_so(caplog):
    models = {MODEL: hostile.model_with_pattern("(a+)+$")}
    async with running_stack(models=models) as stack:
        error = await error_of(stack.generate("a" * 60 + "b"))
        assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "TOKENIZER_FAILED")
        assert any(r.levelno == logging.ERROR and "Panic" in r.message for r in caplog.records)
        error = await error_of(stack.generate(sampling={"bad_words": ["a" * 60 + "b"]}))
        assert error.reason == "TOKENIZER_FAILED"
        assert await stack.answer("hello")


class Collapse(BaseException):
    """As a panic of the tokenizers library: no Exception."""


SEAMS = {
    "tokenizing": lambda stack, model: (model.tokenizer, "encode"),
    "the least number of tokens": lambda stack, model: (model.tokenizer, "least_tokens"),
    "spelling token ids": lambda stack, model: (model.tokenizer, "decode"),
    "making a detokenizer": lambda stack, model: (model.tokenizer, "detokenizer"),
    "detokenizing": lambda stack, model: (CompletionText, "read"),
    "rendering": lambda stack, model: (model.chat_template, "render"),
    "admission": lambda stack, model: (stack.router, "check"),
    "queueing": lambda stack, model: (stack.router, "submit"),
    "checking fields": lambda stack, model: (wire, "to_prompt"),
    "answering": lambda stack, model: (wire, "to_response"),
}


@pytest.mark.parametrize("seam", SEAMS)
async def test_whatever_is_raised_the_call_is_answered_and_the_next_one_works(seam, monkeypatch):
    def collapse(*_, **__):
        raise Collapse(seam)

    model = byte_level_model()
    # As if it were a built-in model's, whose template is rendered in this process.
    model.chat_template.is_known = True
    prompt = {
        "spelling token ids": {"token_ids": {"ids": [1]}, "echo": True},
        "rendering": {"chat": boom("hi")},
    }.get(seam, {})
    async with running_stack(models={MODEL: model}) as stack:
        with monkeypatch.context() as patched:
            patched.setattr(*SEAMS[seam](stack, model), collapse)
            failure = await error_of(stack.generate(**prompt))
            assert failure.code is grpc.StatusCode.INTERNAL
        assert await stack.answer(**prompt)


def test_interrupts_are_no_failures_of_a_job():
    class Interrupted:
        def run(self, model):
            raise KeyboardInterrupt

        model = "m"

    with pytest.raises(KeyboardInterrupt):
        perform(Interrupted(), {"m": None})


async def test_others_are_served_while_a_template_never_ends():
    """More at once than there are places for: the second caller's own messages are rendered."""
    model = hostile.model_with_template(hostile.template("nested loops"))
    async with running_stack(models={MODEL: model}) as stack:
        await stack.answer(chat=boom("hi"))
        attacks = [
            asyncio.create_task(error_of(stack.generate(chat=boom(), timeout=100)))
            for _ in range(12)
        ]
        num_answered = 0
        while not any(attack.done() for attack in attacks):
            assert await stack.answer(chat=boom("hi"), timeout=100)
            num_answered += 1
        # The first attack ends when it has had its second of processor time.
        assert num_answered >= 1
        for attack in attacks:
            assert (await attack).reason in {"INVALID_FIELD", "TOO_MANY_PROMPTS"}


async def test_a_reader_that_was_closed_has_no_children(monkeypatch):
    reader = PromptReader({"m": byte_level_model()})
    job = Encode(model="m", text="x", add_special_tokens=False)
    assert await reader._lanes.short.run(job, 1)
    reader.close()
    reader.close()
