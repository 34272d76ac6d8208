"""`python -m router` as a process: flags, address file, drain, clear words when set up wrongly."""

import asyncio
import contextlib
import signal
import subprocess
import sys

import grpc.aio
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.v1 import inference_pb2, inference_pb2_grpc
from router.__main__ import main
from tests.router.fake_scheduler import MODEL, FakeScheduler, Script
from tests.router.tiny_models import byte_level_tokenizer

pytestmark = pytest.mark.system


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    byte_level_tokenizer().save(str(model / "tokenizer.json"))
    (model / "config.json").write_text("{}")
    return model


async def start(folder, scheduler, *flags):
    address_file = folder / "address"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router", "--scheduler", scheduler.address),
        *("--model", str(folder), "--model-name", MODEL, "--router-id", "router-7"),
        *("--address-file", str(address_file), *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(30):
        while not address_file.exists():  # noqa: ASYNC110 another process makes it
            await asyncio.sleep(0.02)
    return process, address_file.read_text()


async def first_message(stub, call_options):
    """Of a request that is sent again until a worker is ready."""
    async with asyncio.timeout(20):
        while True:
            call = stub.Generate(inference_pb2.GenerateRequest(**call_options))
            with contextlib.suppress(grpc.aio.AioRpcError):
                return call, await call.read()
            await asyncio.sleep(0.02)


async def test_serves_then_drains_on_sigterm_and_exits_well(folder):
    script = Script([65] * 100)
    async with FakeScheduler(script=lambda _: script, interval_s=0.01) as scheduler:
        process, address = await start(folder, scheduler, "--drain-timeout-s", "20")
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            health = health_pb2_grpc.HealthStub(channel)
            call, _ = await first_message(stub, {"text": "secret words"})
            asked = health_pb2.HealthCheckRequest(service="headrace.v1.Inference")
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.SERVING
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                async for answer in health.Watch(asked):
                    if answer.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                        break
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(inference_pb2.GenerateRequest(text="late")).read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            last = None
            while (message := await call.read()) is not grpc.aio.EOF:
                last = message
            assert last.usage.completion_tokens == 100
        _, errors = await process.communicate()
        assert process.returncode == 0
        assert b"Traceback" not in errors
        assert b"secret words" not in errors
        assert scheduler.submissions[0].model == MODEL


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "give at least one --scheduler"),
        (["--scheduler", "h:1"], "give --model"),
        (["--scheduler", "h:1", "--policy", "odd"], "odd"),
    ],
)
def test_missing_settings_are_named(arguments, message):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("chat_template.jinja", "{% for %}", "chat template is broken"),
        ("generation_config.json", '{"top_p": 2}', "generation_config.json: top_p: must be"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(folder, name, content, message):
    (folder / name).write_text(content)
    command = [sys.executable, "-m", "router", "--scheduler", "127.0.0.1:1", "--model", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
