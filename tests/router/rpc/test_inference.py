"""A router's public face, end to end over real gRPC, with a scripted scheduler behind it."""

import asyncio

import grpc
import pytest

from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, inference_pb2
from tests.router.conftest import running_stack
from tests.router.fake_scheduler import FakeScheduler, Script, worker
from tests.router.tiny_models import byte_level_model

TOKENIZER = byte_level_model().tokenizer
END = 262


def says(text, **ending):
    token_ids = TOKENIZER.encode(text, add_special_tokens=False).tolist()
    return lambda submission: Script(token_ids, **ending)


async def test_streams_the_text_that_the_tokens_spell(stack):
    stack.scheduler.script = says("hello world 🎉")
    assert await stack.text() == "hello world 🎉"
