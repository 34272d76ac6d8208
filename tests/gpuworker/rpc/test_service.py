"""The service over a real loopback connection, with a tiny model behind it."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from gpuworker.core.plan import ExecutedStep, ReceivedPlan
from gpuworker.rpc.service import WorkerIdentity
from headrace.service import telemetry
from headrace.service.columns import pack_int32
from headrace.service.errors import from_rpc_error
from headrace.v1 import common_pb2, gpuworker_pb2
from tests.gpuworker.driver import int32
from tests.gpuworker.rpc.serving import (
    PROMPT,
    DeviceRunner,
    Worker,
    expected_tokens,
    first_plan,
    load,
    next_plan,
    tokens_of,
)
from tests.headrace.otlp_receiver import OtlpReceiver
from tests.headrace.waiting import eventually


async def test_describe_is_unavailable_until_the_model_is_loaded(worker: Worker) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Describe(gpuworker_pb2.DescribeRequest())
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "MODEL_LOADING")
    assert error.retry_after_s


async def test_describe_says_what_the_worker_is(worker: Worker) -> None:
    load(worker)
    first = (await worker.stub.Describe(gpuworker_pb2.DescribeRequest())).worker
    assert (first.worker_id, first.model, first.device, first.dtype) == (
        "w1",
        "tiny",
        "cpu",
        "float32",
    )
    assert (first.block_size, first.num_kv_blocks, first.max_num_seqs) == (16, 19, 40)
    assert (first.max_model_len, first.vocab_size) == (512, 160)
    assert list(first.eos_token_ids) == [3, 5]
    assert first.num_spec_tokens == worker.runner.num_spec_tokens
    assert first.pipeline_depth == 2
    assert first.state == common_pb2.WORKER_STATE_READY
    assert len(first.incarnation) > 16
    again = (await worker.stub.Describe(gpuworker_pb2.DescribeRequest())).worker
    assert again.incarnation == first.incarnation
    assert WorkerIdentity("w1", "tiny", "mixed").incarnation != first.incarnation


async def test_steps_give_tokens_in_order(worker: Worker, checkpoint: Path) -> None:
    load(worker)
    call = worker.stub.Execute()
    await call.write(first_plan())
    results = [await call.read()]
    for step_id in (2, 3):
        await call.write(next_plan(step_id))
        results.append(await call.read())
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    assert [r.step_id for r in results] == [1, 2, 3]
    assert [t for r in results for t in tokens_of(r)] == expected_tokens(checkpoint, 3)
    assert all(r.elapsed_s > 0 for r in results)
    assert len(worker.runner.threads) == 1


async def test_the_next_plan_may_come_before_the_previous_result(
    worker: Worker, checkpoint: Path
) -> None:
    load(worker)
    worker.runner.gate.clear()
    call = worker.stub.Execute()
    for plan in (first_plan(), next_plan(2), next_plan(3)):
        await call.write(plan)
    worker.runner.gate.set()
    results = [await call.read() for _ in range(3)]
    assert [t for r in results for t in tokens_of(r)] == expected_tokens(checkpoint, 3)
    call.cancel()


@pytest.fixture
def device_runner(worker: Worker) -> Iterator[DeviceRunner]:
    """In the worker, whose steps it has from then on."""
    worker.runner = DeviceRunner(worker.runner)
    yield worker.runner
    worker.runner.device_may_go_on.set()


async def test_the_next_step_is_launched_while_the_device_is_at_work(
    worker: Worker, device_runner: DeviceRunner, checkpoint: Path
) -> None:
    load(worker)
    call = worker.stub.Execute()
    for plan in (first_plan(), next_plan(2)):
        await call.write(plan)

    async def is_ahead() -> bool:
        return device_runner.launched == [1, 2]

    await eventually(is_ahead)
    assert device_runner.finished == []
    device_runner.device_may_go_on.set()
    results = [await call.read() for _ in range(2)]
    assert [t for r in results for t in tokens_of(r)] == expected_tokens(checkpoint, 2)
    assert device_runner.finished == [1, 2]
    assert len(device_runner.threads) == 1
    call.cancel()


async def test_a_new_stream_takes_over_while_the_device_is_at_work(
    worker: Worker, device_runner: DeviceRunner, checkpoint: Path
) -> None:
    load(worker)
    old = worker.stub.Execute()
    await old.write(first_plan())

    async def has_launched(step_ids: list[int]) -> bool:
        return device_runner.launched == step_ids

    await eventually(partial(has_launched, [1]))
    new = worker.stub.Execute()
    await new.write(first_plan(row=9))
    await eventually(partial(has_launched, [1, 1]))
    device_runner.device_may_go_on.set()
    assert tokens_of(await new.read()) == expected_tokens(checkpoint, 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await old.read()
    assert from_rpc_error(caught.value).reason == "STREAM_REPLACED"
    assert device_runner.finished == [1]  # the new stream's
    new.cancel()


async def test_a_refused_plan_does_not_spoil_the_step_before_it(
    worker: Worker, device_runner: DeviceRunner, checkpoint: Path
) -> None:
    load(worker)
    call = worker.stub.Execute()
    await call.write(first_plan())
    await call.write(next_plan(2, row=7))
    device_runner.device_may_go_on.set()
    assert tokens_of(await call.read()) == expected_tokens(checkpoint, 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert "row 7 is empty" in from_rpc_error(caught.value).message


async def test_other_calls_are_answered_during_a_long_step(worker: Worker) -> None:
    load(worker)
    worker.runner.gate.clear()
    call = worker.stub.Execute()
    await call.write(first_plan())
    async with asyncio.timeout(60):
        await worker.stub.Describe(gpuworker_pb2.DescribeRequest())
        await worker.health.Check(health_pb2.HealthCheckRequest())
    worker.runner.gate.set()
    assert tokens_of(await call.read())
    call.cancel()


async def test_a_worker_whose_step_hangs_is_not_ready_until_it_goes_on(worker: Worker) -> None:
    async def serves() -> bool:
        answer = await worker.health.Check(health_pb2.HealthCheckRequest())
        return answer.status == answer.SERVING

    async def is_stalled() -> bool:
        return not await serves()

    load(worker)
    following = asyncio.create_task(worker.server.follow(worker.service.waits_s, 0.2))
    await eventually(serves)
    worker.runner.gate.clear()
    call = worker.stub.Execute()
    await call.write(first_plan())
    await eventually(is_stalled)
    worker.runner.gate.set()
    assert tokens_of(await call.read())
    # Its request goes on, but there is no work now.
    await eventually(serves)
    assert worker.service.waits_s() == 0
    call.cancel()
    following.cancel()


async def test_a_new_stream_takes_over_and_finds_every_row_empty(
    worker: Worker, checkpoint: Path
) -> None:
    load(worker)
    old = worker.stub.Execute()
    await old.write(first_plan())
    await old.read()
    new = worker.stub.Execute()
    await new.write(first_plan(block=7))
    assert tokens_of(await new.read()) == expected_tokens(checkpoint, 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await old.read()
    assert from_rpc_error(caught.value).reason == "STREAM_REPLACED"
    new.cancel()


async def test_a_new_stream_takes_over_in_the_middle_of_a_step(
    worker: Worker, checkpoint: Path
) -> None:
    load(worker)
    worker.runner.gate.clear()
    old = worker.stub.Execute()
    for plan in (first_plan(), next_plan(2), next_plan(3)):
        await old.write(plan)
    new = worker.stub.Execute()
    await new.write(first_plan(row=9))
    worker.runner.gate.set()
    assert tokens_of(await new.read()) == expected_tokens(checkpoint, 1)
    await new.write(next_plan(2, row=9))
    assert tokens_of(await new.read()) == expected_tokens(checkpoint, 2)[1:]
    old.cancel()
    new.cancel()


async def test_a_broken_plan_ends_the_stream_with_a_clear_error(worker: Worker) -> None:
    load(worker)
    call = worker.stub.Execute()
    await call.write(next_plan(2))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc_error(caught.value)
    assert error.code == grpc.StatusCode.INVALID_ARGUMENT
    assert "row 2 is empty" in error.message


async def test_a_column_of_odd_size_ends_the_stream_with_its_name(worker: Worker) -> None:
    load(worker)
    call = worker.stub.Execute()
    await call.write(gpuworker_pb2.StepPlan(rows=b"12345"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert from_rpc_error(caught.value).field == "rows"


class Panic(BaseException):
    """As a library in Rust raises it."""


@pytest.mark.parametrize("bug", [ZeroDivisionError, Panic])
async def test_a_bug_while_reading_ends_the_stream_too(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, bug: type[BaseException]
) -> None:
    load(worker)

    def fail(_message: gpuworker_pb2.StepPlan) -> ReceivedPlan:
        raise bug

    monkeypatch.setattr("gpuworker.rpc.service.wire.step_plan", fail)
    call = worker.stub.Execute()
    await call.write(first_plan())
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert from_rpc_error(caught.value).code == grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("bug", [ZeroDivisionError, Panic])
async def test_a_bug_in_a_step_ends_the_stream_and_the_worker_serves_on(
    worker: Worker, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, bug: type[BaseException]
) -> None:
    load(worker)

    def fail(_plan: ReceivedPlan) -> ExecutedStep:
        raise bug

    with monkeypatch.context() as patch:
        patch.setattr(worker.runner, "launch", fail)
        call = worker.stub.Execute()
        await call.write(first_plan())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert from_rpc_error(caught.value).code == grpc.StatusCode.INTERNAL
    again = worker.stub.Execute()
    await again.write(first_plan())
    assert tokens_of(await again.read()) == expected_tokens(checkpoint, 1)
    again.cancel()


async def test_a_worker_serves_on_after_a_stream_broke(worker: Worker, checkpoint: Path) -> None:
    load(worker)
    call = worker.stub.Execute()
    await call.write(first_plan())
    await call.read()
    call.cancel()
    again = worker.stub.Execute()
    await again.write(first_plan())
    assert tokens_of(await again.read()) == expected_tokens(checkpoint, 1)
    again.cancel()


async def test_block_transfer_says_why_it_is_not_there(worker: Worker) -> None:
    load(worker)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.TransferBlocks(iter([gpuworker_pb2.BlockChunk()]))
    error = from_rpc_error(caught.value)
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED, "NO_BLOCK_TRANSFER")


async def test_a_draining_worker_finishes_what_it_has_and_takes_no_stream(worker: Worker) -> None:
    load(worker)
    worker.runner.gate.clear()
    call = worker.stub.Execute()
    await call.write(first_plan())
    assert await asyncio.to_thread(worker.runner.has_begun.wait, 10)
    assert not await worker.service.drain(0.01)
    draining = asyncio.create_task(worker.service.drain(10))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.Execute().read()
    assert from_rpc_error(caught.value).reason == "DRAINING"
    described = await worker.stub.Describe(gpuworker_pb2.DescribeRequest())
    assert described.worker.state == common_pb2.WORKER_STATE_DRAINING
    worker.runner.gate.set()
    assert tokens_of(await call.read())
    notice = await call.read()
    assert notice.draining
    assert notice.step_id == 0
    await call.write(next_plan(2))
    assert tokens_of(await call.read())
    assert not draining.done()
    await call.write(gpuworker_pb2.StepPlan(step_id=3, freed_rows=pack_int32(int32(2))))
    assert not tokens_of(await call.read())
    assert await draining
    call.cancel()


async def test_a_worker_whose_stream_is_gone_has_nothing_to_finish(worker: Worker) -> None:
    load(worker)
    call = worker.stub.Execute()
    await call.write(first_plan())
    await call.read()
    call.cancel()
    assert await worker.service.drain(10)
    assert worker.runner.num_requests == 0


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    receiver = OtlpReceiver()
    traces = telemetry.setup("headrace-gpuworker", receiver.endpoint)
    yield receiver
    traces.shutdown()
    receiver.stop()


async def test_a_traced_step_has_a_span_under_its_plan(
    worker: Worker, receiver: OtlpReceiver
) -> None:
    load(worker)
    plan = first_plan()
    plan.traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    call = worker.stub.Execute()
    await call.write(plan)
    await call.read()
    await call.write(next_plan(2))
    await call.read()
    call.cancel()
    (span,) = await asyncio.to_thread(receiver.wait, 1)
    assert (span.name, span.trace_id, span.parent_id) == ("gpuworker step", "a" * 32, "b" * 16)
    assert span.attributes["headrace.num_tokens"] == len(PROMPT)
