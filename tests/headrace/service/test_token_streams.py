"""A stream of plans with a token, as schedulers call gpuworkers."""

import asyncio

import grpc.aio
import pytest

from headrace.service.channels import ChannelConfig, open_channel
from headrace.v1 import gpuworker_pb2_grpc
from tests.headrace.service.test_requests import serving
from tests.headrace.waiting import until


@pytest.fixture
def token(tmp_path):
    file = tmp_path / "token"
    file.write_text("s3cret")
    return file


async def test_a_stream_sends_the_token_and_leaves_no_task_behind_when_it_fails(token):
    async with serving(token) as (_, address):
        config = ChannelConfig(auth_token_file=str(token))
        async with open_channel(address, config) as channel, asyncio.timeout(60):
            stub = gpuworker_pb2_grpc.GpuWorkerStub(channel)
            before = asyncio.all_tasks()
            call = stub.Execute(metadata=(("x-other", "1"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            # The token was right; this server only lacks the method.
            assert refused.value.code() is grpc.StatusCode.INTERNAL
            ours = {asyncio.current_task()}
            await until(
                lambda: (
                    not any(
                        "_consume_request_iterator" in repr(task)
                        for task in asyncio.all_tasks() - before - ours
                    )
                ),
                timeout_s=10,
            )
