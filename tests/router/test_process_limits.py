"""A router process under hostile models and big prompts: it can be stopped, and stays small."""

import asyncio
import json
import signal

import grpc.aio
import psutil
import pytest

from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.router.fake_scheduler import FakeScheduler
from tests.router.test_main import first_message, folder, start  # noqa: F401 a fixture
from tests.router.text import hostile

pytestmark = pytest.mark.system

OPTIONS = [("grpc.max_send_message_length", -1)]
BIG_BYTES = 3_000_000


async def test_sigterm_works_while_a_template_never_ends(folder):  # noqa: F811
    template = {"chat_template": hostile.template("nested loops")}
    (folder / "tokenizer_config.json").write_text(json.dumps(template))
    async with FakeScheduler() as scheduler:
        process, address = await start(folder, scheduler)
        ours = [psutil.Process(process.pid)]
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await first_message(stub, {"text": "hello"})
            message = {"role": "user", "content": "boom"}
            chat = inference_pb2.GenerateRequest(chat={"messages": [message]})
            calls = [stub.Generate(chat) for _ in range(3)]
            ours += ours[0].children(recursive=True)
            process.send_signal(signal.SIGTERM)
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
        _, errors = await process.communicate()
        assert process.returncode == 0
        assert b"Traceback" not in errors
        _, alive = psutil.wait_procs(ours, timeout=30)
        assert not alive


async def test_memory_that_big_prompts_took_is_given_back(folder):  # noqa: F811
    async with FakeScheduler() as scheduler:
        process, address = await start(folder, scheduler)
        try:
            async with grpc.aio.insecure_channel(address, options=OPTIONS) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                await first_message(stub, {"text": "hello"})
                before = resident_bytes(process)
                request = inference_pb2.GenerateRequest(text="hello " * (BIG_BYTES // 6))
                for _ in range(3):
                    calls = [stub.Generate(request) for _ in range(20)]
                    await asyncio.gather(*(call.code() for call in calls))
                # In all the prompts had three times as much.
                async with asyncio.timeout(60):
                    while resident_bytes(process) - before > 20 * BIG_BYTES:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
        finally:
            process.kill()
            await process.communicate()


def resident_bytes(process):
    return psutil.Process(process.pid).memory_info().rss
