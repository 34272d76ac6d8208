"""Audits of a running scheduler: its book of KV blocks against the worker's rows."""

import asyncio
from collections.abc import Callable

import grpc.aio
import numpy as np
import pytest

from headrace.service.columns import pack_int32
from headrace.service.errors import ServiceError
from headrace.v1 import common_pb2, gpuworker_pb2
from scheduler.config import SchedulerSettings
from scheduler.core.scheduler import SchedulerCore
from scheduler.rpc.audit import row_tables_of
from tests.scheduler.fake_gpuworker import FakeGpuWorker
from tests.scheduler.harness import router_to, running_scheduler, until

PROMPT = list(range(20, 31))


async def started(**fields: object) -> FakeGpuWorker:
    worker = FakeGpuWorker(**fields)
    await worker.start()
    return worker


def only(audits: list[common_pb2.WorkerAudit]) -> common_pb2.WorkerAudit:
    (audit,) = audits
    return audit


async def test_a_worker_at_work_has_a_sound_ledger_and_every_row_is_compared() -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        handles = [await router.submit([n, *PROMPT], 200) for n in range(3)]
        for handle in handles:
            await router.has_tokens(handle, 1)
        audit = only(await router.audit())
        assert list(audit.faults) == []
        assert (audit.worker_id, audit.scheduler_id, audit.num_kv_blocks) == ("w0", "s0", 64)
        assert (audit.num_requests, audit.num_compared_rows) == (3, 3)
        assert audit.num_owned_blocks >= 9
        assert audit.num_owned_blocks + audit.num_cached_blocks + audit.num_free_blocks == 64
        await router.cancel(*handles)
        await router.finished(*handles)


async def test_an_idle_worker_is_sent_an_empty_plan_so_that_its_rows_are_compared() -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        await router.finished(await router.submit(PROMPT, 3))
        audit = only(await router.audit())
        assert list(audit.faults) == []
        assert audit.HasField("num_compared_rows")
        assert audit.num_owned_blocks == 0
        assert audit.num_cached_blocks == 3  # of 11 prompt tokens and 3 more, in blocks of 4
        (asked,) = [plan for plan in worker.plans if plan.audit]
        assert not asked.rows


@pytest.mark.parametrize("pipeline_depth", [1, 2])
async def test_the_ledger_stays_sound_while_requests_come_pause_and_go(pipeline_depth: int) -> None:
    worker = await started(num_kv_blocks=24, max_num_seqs=5)
    settings = SchedulerSettings(pipeline_depth=pipeline_depth)
    async with running_scheduler([worker], settings) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        handles: list[int] = []
        num_compared = 0
        for number in range(20):
            handles.append(await router.submit([*PROMPT, number], 12))
            if number % 3 == 0:
                await router.pause(handles[number // 2])
            if number % 5 == 0:
                await router.cancel(handles[number // 3])
            audit = only(await router.audit())
            assert list(audit.faults) == []
            assert audit.HasField("num_compared_rows")
            num_compared += audit.num_compared_rows
        for handle in handles:
            await router.pause(handle, paused=False)
        await router.finished(*handles)
        assert num_compared > 0


def change_a_block(tables: dict[int, list[int]]) -> None:
    tables[1][2] = 60


def swap_two_blocks(tables: dict[int, list[int]]) -> None:
    tables[1][:2] = reversed(tables[1][:2])


def lose_a_block(tables: dict[int, list[int]]) -> None:
    tables[1].pop()


def lose_a_row(tables: dict[int, list[int]]) -> None:
    del tables[1]


def keep_a_freed_row(tables: dict[int, list[int]]) -> None:
    tables[9] = [50, 51]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (change_a_block, "the worker has block 60 at place 2 of row 1, the book has block"),
        (swap_two_blocks, "at place 0 of row 1, the book has block"),
        (lose_a_block, "blocks in row 1, the book has"),
        (lose_a_row, "the worker does not have row 1, which runs a request"),
        (keep_a_freed_row, "the worker has row 9 with 2 blocks, which is free"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_notices_a_worker_with_other_rows_than_the_book(
    spoil: Callable[[dict[int, list[int]]], None], sentence: str
) -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        handles = [await router.submit([n, *PROMPT], 200) for n in range(2)]
        for handle in handles:
            await router.has_tokens(handle, 1)
        worker.spoil_audit = spoil
        (fault,) = only(await router.audit()).faults
        assert sentence in fault
        await router.cancel(*handles)
        await router.finished(*handles)


async def test_a_block_that_leaked_in_the_book_is_reported_and_serving_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler.build.SchedulerCore", SchedulerCore)
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        pool = scheduler.pool.engines[0]._core.state.kv.pool
        (leaked,) = pool.allocate(1)
        faults = only(await router.audit()).faults
        assert f"block {leaked} has no owner" in faults
        await router.finished(await router.submit(PROMPT, 3))
        pool.release([leaked])
        assert list(only(await router.audit()).faults) == []


async def test_a_request_that_the_engine_forgot_is_reported() -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        worker.hold()
        handle = await router.submit(PROMPT, 2)
        await worker.held()
        requests = scheduler.pool.engines[0]._requests
        key, request = requests.popitem()
        (engine,) = scheduler.pool.engines
        (fault,) = (await engine.audit(0.0)).faults
        assert fault == "r0-0 lives on, and the caller has forgotten it"
        requests[key] = request
        await worker.release()
        await router.finished(handle)


async def test_a_worker_that_does_not_answer_in_time_is_audited_without_its_rows() -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        worker.hold()
        handle = await router.submit(PROMPT, 2)
        await worker.held()
        (engine,) = scheduler.pool.engines
        audit = await engine.audit(0.0)
        assert audit.num_compared_rows is None
        assert (audit.faults, audit.book.num_requests) == ((), 1)
        await worker.release()
        await router.finished(handle)


async def test_a_worker_that_is_lost_meanwhile_is_left_out() -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        worker.hold()
        handle = await router.submit(PROMPT, 2)
        await worker.held()
        audit = asyncio.create_task(router.audit())
        (engine,) = scheduler.pool.engines
        await until(lambda: engine._auditor._asked)
        await worker.kill()
        assert await audit == []
        await worker.release()
        await worker.start()
        await router.finished(handle)


async def test_callers_that_ask_together_share_one_walk() -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        worker.hold()
        handle = await router.submit(PROMPT, 2)
        await worker.held()
        (engine,) = scheduler.pool.engines
        audits = [asyncio.create_task(engine.audit(60.0)) for _ in range(3)]
        await until(lambda: len(engine._auditor._asked) == 3)
        await worker.release()
        first, *others = await asyncio.gather(*audits)
        assert first is not None
        assert all(other.book is first.book for other in others)
        await router.finished(handle)


async def test_an_audit_that_fails_costs_the_caller_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = await started()
    async with running_scheduler([worker]) as scheduler, router_to(scheduler) as router:
        await scheduler.ready()
        (engine,) = scheduler.pool.engines
        with monkeypatch.context() as patch:
            patch.setattr(engine._auditor, "_walk", lambda: 1 // 0)
            with pytest.raises(grpc.aio.AioRpcError, match="ZeroDivisionError"):
                await router.audit()
        assert scheduler.pool.engines == [engine]
        await router.finished(await router.submit(PROMPT, 3))


def test_an_account_that_contradicts_itself_is_refused_by_name() -> None:
    for columns in (
        {"rows": [1], "num_blocks": []},
        {"rows": [1], "num_blocks": [2], "block_ids": [3]},
        {"rows": [1, 2], "num_blocks": [2, -1], "block_ids": [3]},
    ):
        packed = {name: pack_int32(np.array(ids, np.int32)) for name, ids in columns.items()}
        with pytest.raises(ServiceError, match=r"audit\.num_blocks"):
            row_tables_of(gpuworker_pb2.RowsAudit(**packed))
