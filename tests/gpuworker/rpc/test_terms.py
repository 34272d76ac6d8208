"""Two schedulers at one worker: the one with the greater term has it while its stream lives."""

from pathlib import Path

import grpc.aio
import pytest

from headrace.service import terms
from headrace.service.errors import from_rpc_error
from headrace.v1 import gpuworker_pb2
from tests.gpuworker.rpc.serving import (
    Worker,
    expected_tokens,
    first_plan,
    load,
    next_plan,
    tokens_of,
)
from tests.headrace.waiting import eventually

Call = grpc.aio.StreamStreamCall[gpuworker_pb2.StepPlan, gpuworker_pb2.StepResult]


@pytest.fixture
def ready_worker(worker: Worker) -> Worker:
    load(worker)
    return worker


async def taken(worker: Worker, term: int) -> Call:
    """A stream that the worker has taken."""
    call: Call = worker.stub.Execute(metadata=terms.metadata_of(term))
    assert terms.term_in(await call.initial_metadata()) == term
    return call


async def refused(worker: Worker, term: int) -> tuple[grpc.StatusCode, str]:
    """Why the worker does not take a stream."""
    call = worker.stub.Execute(metadata=terms.metadata_of(term))
    assert terms.term_in(await call.initial_metadata()) is None
    return await error_of(call)


async def error_of(call: Call) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    return caught.value.code(), from_rpc_error(caught.value).reason


async def test_the_scheduler_that_started_later_takes_the_worker_over(ready_worker: Worker) -> None:
    older = await taken(ready_worker, 5)
    newer = await taken(ready_worker, 6)
    assert await error_of(older) == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")
    newer.cancel()


async def test_an_older_scheduler_does_not_disturb_a_newer_one(
    ready_worker: Worker, checkpoint: Path
) -> None:
    newer = await taken(ready_worker, 6)
    await newer.write(first_plan())
    first = tokens_of(await newer.read())
    assert await refused(ready_worker, 5) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "NEWER_OWNER",
    )
    await newer.write(next_plan(2))
    assert first + tokens_of(await newer.read()) == expected_tokens(checkpoint, 2)
    newer.cancel()


async def test_an_older_scheduler_gets_the_worker_when_the_newer_stream_has_ended(
    ready_worker: Worker, checkpoint: Path
) -> None:
    newer = await taken(ready_worker, 6)
    await newer.write(first_plan())
    await newer.read()
    newer.cancel()

    async def is_empty() -> bool:
        return not ready_worker.runner.num_requests

    await eventually(is_empty)
    older = await taken(ready_worker, 5)
    await older.write(first_plan(block=7))
    assert tokens_of(await older.read()) == expected_tokens(checkpoint, 1)
    older.cancel()


async def test_a_stream_of_the_same_scheduler_replaces_its_older_one(ready_worker: Worker) -> None:
    first = await taken(ready_worker, 5)
    second = await taken(ready_worker, 5)
    assert await error_of(first) == (grpc.StatusCode.ABORTED, "STREAM_REPLACED")
    second.cancel()


async def test_a_scheduler_without_a_term_yields_to_one_with_a_term(ready_worker: Worker) -> None:
    newer = await taken(ready_worker, 1)
    call = ready_worker.stub.Execute()
    assert (await error_of(call))[1] == "NEWER_OWNER"
    newer.cancel()


@pytest.mark.parametrize("value", ["", "-1", "1.5", "later", "9" * 21])
async def test_a_term_that_is_no_number_is_refused_by_name(
    ready_worker: Worker, value: str
) -> None:
    call = ready_worker.stub.Execute(metadata=((terms.KEY, value),))
    with pytest.raises(grpc.aio.AioRpcError, match=terms.KEY) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_no_row_is_left_of_a_scheduler_that_was_replaced(ready_worker: Worker) -> None:
    older = await taken(ready_worker, 5)
    await older.write(first_plan())
    await older.read()
    newer = await taken(ready_worker, 6)
    await newer.write(gpuworker_pb2.StepPlan(step_id=1, audit=True))
    assert (await newer.read()).audit.rows == b""
    newer.cancel()


async def test_an_owner_whose_lease_went_to_another_is_refused_for_good(
    ready_worker: Worker,
) -> None:
    first, second = terms.FIRST_LEASED + 7, terms.FIRST_LEASED + 8
    older = await taken(ready_worker, first)
    newer = await taken(ready_worker, second)
    assert (await error_of(older))[1] == "STREAM_REPLACED"
    newer.cancel()

    async def is_left() -> bool:
        stream = ready_worker.service._stream
        return stream is not None and not stream.is_current

    await eventually(is_left)
    for term in (first, 1):
        assert (await refused(ready_worker, term))[1] == "NEWER_OWNER"
    (await taken(ready_worker, second)).cancel()
