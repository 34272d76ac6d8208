"""Blocks in transfer between workers: imports, exports, and how each of them ends."""

import numpy as np
import pytest

from scheduler.core.plan import (
    NewRequest,
    RemotePrefix,
    RequestStatus,
    SchedulerConfig,
    StepPlan,
    StepResult,
    WaitReason,
)
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import check_book

BLOCK_SIZE = 4


def core_of(num_blocks: int = 40, **changes) -> SchedulerCore:
    values = {"max_model_len": 64, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    return SchedulerCore(
        SchedulerConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks + 1, **(values | changes))
    )


def request(key: int, num_tokens: int, *, num_remote_blocks: int = 0, **changes) -> NewRequest:
    """All prompts are prefixes of one; expires_at is 10 s."""
    remote = RemotePrefix("w2/lease", num_remote_blocks, 10.0) if num_remote_blocks else None
    values = {"max_tokens": 2, "remote_prefix": remote}
    return NewRequest(
        key=key,
        request_id=f"r{key}",
        prompt_token_ids=np.arange(3, 3 + num_tokens, dtype=np.int32),
        **(values | changes),
    )


def step(core: SchedulerCore, now: float = 0.0) -> StepPlan:
    """Plan a step and give a token to each row that has its whole prompt."""
    plan = core.schedule(now)
    check_book(core)
    counts = (~plan.is_prefill_chunk).astype(np.int32)
    tokens = np.full(int(counts.sum()), 99, np.int32)
    core.update(StepResult(step_id=plan.step_id, num_sampled_tokens=counts, token_ids=tokens), now)
    check_book(core)
    return plan


def reasons(plan: StepPlan) -> list[WaitReason]:
    return [fact.reason for fact in plan.facts.passed_over]


def begun(core: SchedulerCore, num_tokens: int = 18, num_remote_blocks: int = 4):
    """A core with one request whose import has begun, and the lease."""
    core.add_request(request(1, num_tokens, num_remote_blocks=num_remote_blocks), 0.0)
    plan = step(core)
    assert reasons(plan) == [WaitReason.REMOTE_KV]
    assert not plan.num_reqs
    (lease,) = plan.begun_leases
    return lease


def test_a_request_computes_only_what_has_not_come():
    core = core_of()
    lease = begun(core)
    assert (lease.source, len(lease.missing_block_ids)) == ("w2/lease", 4)
    assert reasons(step(core)) == [WaitReason.REMOTE_KV]
    core.commit_lease(lease.lease_id)
    plan = step(core)
    assert plan.num_computed_tokens.tolist() == [16]
    assert plan.num_scheduled_tokens.tolist() == [2]
    assert plan.appended_block_ids.tolist()[:4] == list(lease.block_ids)
    assert plan.ended_leases == (lease.lease_id,)
    assert core.audit().num_leased_blocks == 0


def test_the_last_token_is_computed_here_even_if_its_block_has_come():
    core = core_of()
    lease = begun(core, num_tokens=16, num_remote_blocks=4)
    assert len(lease.block_ids) == 3


def test_only_blocks_that_are_not_cached_here_are_fetched():
    core = core_of()
    core.add_request(request(0, 9, max_tokens=1), 0.0)
    step(core)
    lease = begun(core)
    assert (lease.num_present, len(lease.missing_block_ids)) == (2, 2)


def test_nothing_is_fetched_when_all_of_it_is_here():
    core = core_of()
    core.add_request(request(0, 18), 0.0)
    step(core)
    core.add_request(request(1, 18, num_remote_blocks=4), 0.0)
    plan = step(core)
    assert not plan.begun_leases
    assert [admission.num_cached_tokens for admission in plan.admissions] == [16]


def test_after_a_failed_transfer_the_prompt_is_computed_here():
    core = core_of()
    lease = begun(core)
    core.end_lease(lease.lease_id)
    check_book(core)
    plan = step(core)
    assert plan.ended_leases == (lease.lease_id,)
    assert plan.num_scheduled_tokens.tolist() == [18]
    # The plan that ends the lease may use its blocks.
    assert set(plan.appended_block_ids.tolist()) & set(lease.block_ids)


def test_a_transfer_that_takes_too_long_is_given_up():
    core = core_of()
    lease = begun(core)
    assert reasons(step(core, 9.9)) == [WaitReason.REMOTE_KV]
    plan = step(core, 10.0)
    assert plan.ended_leases == (lease.lease_id,)
    assert plan.num_scheduled_tokens.tolist() == [18]


@pytest.mark.parametrize("late", ["commit_lease", "end_lease"])
def test_a_transfer_that_ends_after_its_lease_changes_nothing(late):
    core = core_of()
    lease = begun(core)
    core.abort(1)
    assert core.num_free_blocks == 40
    getattr(core, late)(lease.lease_id)
    check_book(core)
    assert core.kv_blocks.num_cached == 0
    assert step(core).ended_leases == (lease.lease_id,)


def test_an_abort_after_the_commit_leaves_the_contents_in_the_prefix_cache():
    core = core_of()
    lease = begun(core)
    core.commit_lease(lease.lease_id)
    core.abort(1)
    check_book(core)
    assert (core.kv_blocks.num_held, core.kv_blocks.num_cached) == (0, 4)


def test_a_request_without_room_for_its_import_waits_and_does_not_block_others():
    core = core_of(num_blocks=11, max_num_seqs=2)
    core.add_request(request(0, 30, max_tokens=3, cache_salt="other"), 0.0)
    step(core)
    core.add_request(request(1, 18, num_remote_blocks=4), 0.0)
    core.add_request(request(2, 3, max_tokens=1), 0.0)
    plan = step(core)
    assert reasons(plan) == [WaitReason.REMOTE_KV]
    assert not plan.begun_leases
    assert [admission.key for admission in plan.admissions] == [2]
    step(core)
    assert len(step(core).begun_leases) == 1


def test_imports_leave_half_of_the_pool_to_running_requests():
    core = core_of(num_blocks=14)
    lease = begun(core)
    core.add_request(request(2, 18, num_remote_blocks=4, cache_salt="other"), 0.0)
    assert not step(core).begun_leases
    core.end_lease(lease.lease_id)
    assert len(step(core).begun_leases) == 1


def test_without_a_prefix_cache_nothing_is_fetched():
    core = core_of(enable_prefix_caching=False)
    core.add_request(request(1, 18, num_remote_blocks=4), 0.0)
    plan = step(core)
    assert not plan.begun_leases
    assert plan.num_scheduled_tokens.tolist() == [18]


def finished_with_export(core: SchedulerCore):
    """A request that has ended, with its export; and the plan that tells of it."""
    core.add_request(request(1, 18, max_tokens=1, export_s=5.0), 0.0)
    plan = core.schedule(0.0)
    output = core.update(
        StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=np.array([1], np.int32),
            token_ids=np.array([99], np.int32),
        ),
        1.0,
    )
    (finished,) = output.finished
    assert finished.status is RequestStatus.LENGTH_CAPPED
    return finished, core.schedule(1.0)


def test_an_export_keeps_the_full_blocks_until_it_is_done():
    core = core_of()
    finished, plan = finished_with_export(core)
    (lease,) = plan.begun_leases
    assert finished.export_lease_id == lease.lease_id
    assert (len(lease.block_ids), lease.is_import) == (4, False)
    assert core.audit().num_leased_blocks == 4
    core.end_lease(lease.lease_id)
    assert core.schedule(1.0).ended_leases == (lease.lease_id,)
    assert core.num_free_blocks == 40
    assert core.kv_blocks.num_cached == 4


def test_an_export_that_nobody_fetches_ends_by_itself():
    core = core_of()
    finished, _ = finished_with_export(core)
    assert core.schedule(5.9).ended_leases == ()
    assert core.schedule(6.0).ended_leases == (finished.export_lease_id,)
    check_book(core)
    assert core.num_free_blocks == 40


def test_requests_share_the_blocks_of_an_export():
    core = core_of()
    finished_with_export(core)
    core.add_request(request(2, 18), 0.0)
    plan = step(core, 2.0)
    assert [admission.num_cached_tokens for admission in plan.admissions] == [16]


@pytest.mark.parametrize("status", [RequestStatus.ABORTED, RequestStatus.DEADLINE])
def test_a_request_that_nobody_continues_exports_nothing(status):
    core = core_of()
    core.add_request(request(1, 18, max_tokens=9, export_s=5.0), 0.0)
    step(core)
    finished = core.abort(1, status)
    assert finished is not None
    assert finished.export_lease_id is None
    assert core.num_free_blocks == 40
