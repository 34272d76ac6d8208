"""Services as processes, with peers that hold on to them: SIGTERM ends each all the same."""

import asyncio
import os
import signal
import sys

import pytest

from tests.headrace.raw_http2 import DATA, HEADERS, RawHttp2
from tests.headrace.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.model]

WATCH = "/grpc.health.v1.Health/Watch"
FLAGS = {
    "router": ("--scheduler", "127.0.0.1:1"),
    "scheduler": ("--worker", "127.0.0.1:1"),
    "gpuworker": ("--dtype", "float32", "--num-kv-blocks", "8", "--max-model-len", "64"),
}


@pytest.mark.parametrize("program", FLAGS)
async def test_a_service_stops_while_a_watcher_takes_no_byte(program, model_path, tmp_path):
    file = tmp_path / "address"
    model = () if program == "scheduler" else ("--model", str(model_path))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", program, *FLAGS[program], *model),
        *("--address-file", str(file), "--drain-timeout-s", "0.1", "--log-level", "error"),
        env=os.environ | {"HEADRACE_PARENT_DEATH": "1"},
    )
    try:
        await until(file.exists)
        address = file.read_text(encoding="utf-8")
        with RawHttp2(address, window=0) as stalled, RawHttp2(address) as reading:
            stalled.call(WATCH)
            unfinished = stalled.headers("/grpc.health.v1.Health/Check")
            stalled.message(unfinished, b"", num_bytes=100)
            stream = reading.call(WATCH)
            await asyncio.to_thread(reading.until, HEADERS, stream)
            assert await asyncio.to_thread(reading.until, DATA, stream)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
