"""How a worker's own limits and the scheduler's settings make a core's configuration."""

import pytest

from headrace.service.errors import ServiceError
from headrace.v1 import common_pb2
from scheduler.build import as_driven, core_config
from scheduler.config import SchedulerSettings
from scheduler.rpc.wire import worker_info


def worker(**said: int) -> common_pb2.Worker:
    return common_pb2.Worker(
        worker_id="w",
        max_model_len=64,
        block_size=4,
        num_kv_blocks=16,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        vocab_size=100,
        **said,  # type: ignore[arg-type]  # mypy cannot tell these from the others
    )


@pytest.mark.parametrize(("said", "depth"), [(0, 1), (1, 1), (2, 2), (9, 2)])
def test_plans_are_made_as_far_ahead_as_the_worker_says(said: int, depth: int) -> None:
    config = core_config(worker_info(worker(pipeline_depth=said)), SchedulerSettings())
    assert config.pipeline_depth == depth


@pytest.mark.parametrize("depth", [1, 2])
def test_a_setting_wins_over_what_the_worker_says(depth: int) -> None:
    info = worker_info(worker(pipeline_depth=3 - depth))
    assert core_config(info, SchedulerSettings(pipeline_depth=depth)).pipeline_depth == depth


def test_drafts_are_verified_only_where_each_plan_waits_for_the_last_result() -> None:
    info = worker_info(worker(num_spec_tokens=3, pipeline_depth=1))
    assert core_config(info, SchedulerSettings()).num_spec_tokens == 3
    assert core_config(info, SchedulerSettings(pipeline_depth=2)).num_spec_tokens == 0


def test_settings_narrow_a_workers_limits_and_never_widen_them() -> None:
    info = worker_info(worker())
    narrow = core_config(info, SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=16))
    assert (narrow.max_num_seqs, narrow.max_num_batched_tokens) == (2, 16)
    wide = core_config(info, SchedulerSettings(max_num_seqs=99, max_num_batched_tokens=99))
    assert (wide.max_num_seqs, wide.max_num_batched_tokens) == (8, 32)


def test_no_request_gets_more_than_half_of_a_step_unless_told_otherwise() -> None:
    info = worker_info(worker(num_spec_tokens=3, pipeline_depth=1))
    assert core_config(info, SchedulerSettings()).long_prefill_token_threshold == 16
    narrow = SchedulerSettings(max_num_batched_tokens=4)
    assert core_config(info, narrow).long_prefill_token_threshold == 4
    assert core_config(info, SchedulerSettings()).long_prefill_share == 0.5
    told = SchedulerSettings(long_prefill_token_threshold=30)
    assert core_config(info, told).long_prefill_token_threshold == 30


def test_routers_are_told_the_limits_that_a_workers_steps_have() -> None:
    info = worker_info(worker())
    narrow = SchedulerSettings(max_num_seqs=2, max_num_batched_tokens=16)
    told = as_driven(info, core_config(info, narrow))
    assert (told.max_num_seqs, told.max_num_batched_tokens) == (2, 16)


@pytest.mark.parametrize(
    ("policy", "preempts", "displaces"),
    [("priority", True, True), ("priority", False, False), ("fcfs", True, False)],
)
def test_routers_are_told_whether_urgent_requests_displace_others(
    policy: str, preempts: bool, displaces: bool
) -> None:
    info = worker_info(worker())
    settings = SchedulerSettings(policy=policy, priority_preemption=preempts)  # type: ignore[arg-type]
    assert as_driven(info, core_config(info, settings)).displaces_by_priority is displaces


def test_a_worker_that_says_nonsense_is_refused_with_the_field() -> None:
    message = worker()
    message.block_size = 0
    with pytest.raises(ServiceError, match="block_size"):
        worker_info(message)
