"""Speculative tokens: scheduled with the others, verified, taken back when rejected."""

from collections.abc import Callable

import numpy as np
import pytest

from scheduler.core.plan import StepResult
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


def computed(driver: Driver, name: str) -> int:
    table = driver.core.state.table
    rows = [row for row in table.running_rows.tolist() if table.request(row).request_id == name]
    return table.num_computed.item(rows[0])


def test_rejected_drafts_are_computed_again(make_core: MakeCore) -> None:
    driver = Driver(make_core(num_spec_tokens=3, spec_kind="ngram"))
    driver.add(new_request(0, 10, max_tokens=20))
    driver.step()
    driver.propose({"r0": 3})
    plan = driver.schedule()
    assert plan.num_scheduled_tokens.tolist() == [4]
    assert plan.num_draft_tokens.tolist() == [3]
    assert plan.draft_token_ids.tolist() == [7, 7, 7]
    driver.update(plan, {"r0": [7, 9]})
    assert computed(driver, "r0") == 12
    assert driver.schedule().num_computed_tokens.tolist() == [12]


def test_drafts_that_a_step_has_no_room_for_are_lost(make_core: MakeCore) -> None:
    driver = Driver(make_core(num_spec_tokens=3, spec_kind="ngram", max_num_batched_tokens=2))
    driver.add(new_request(0, 2))
    driver.step()
    driver.propose({"r0": 3})
    plans = driver.steps(2)
    assert [plan.num_draft_tokens.tolist() for plan in plans] == [[1], []]


def test_drafts_in_a_result_are_attached(make_core: MakeCore) -> None:
    core = make_core(num_spec_tokens=2, spec_kind="draft", max_num_batched_tokens=30)
    driver = Driver(core)
    driver.add(new_request(0, 10), new_request(1, 60))
    plan = driver.schedule()
    core.update(
        StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=np.array([1, 0], np.int32),
            token_ids=np.array([5], np.int32),
            num_draft_tokens=np.array([2, 1], np.int32),
            draft_token_ids=np.array([8, 9, 10], np.int32),
        ),
        0.0,
    )
    plan = driver.schedule()
    # r1 is still in its prefill: its draft is dropped.
    assert plan.num_scheduled_tokens.tolist() == [3, 27]
    assert plan.num_draft_tokens.tolist() == [2, 0]
    assert plan.draft_token_ids.tolist() == [8, 9]


@pytest.mark.parametrize(("max_model_len", "is_admitted"), [(4, True), (3, False)])
def test_who_joins_decodes_is_padded_with_placeholders_if_they_fit(
    make_core: MakeCore, max_model_len: int, is_admitted: bool
) -> None:
    driver = Driver(make_core(num_spec_tokens=3, spec_kind="ngram", max_model_len=max_model_len))
    driver.add(new_request(0, 1))
    driver.step()
    driver.add(new_request(1, 1))
    plan = driver.step()
    if is_admitted:
        assert plan.num_scheduled_tokens.tolist() == [1, 4]
        assert plan.num_draft_tokens.tolist() == [0, 3]
        assert plan.draft_token_ids.tolist() == [-1, -1, -1]
    else:
        assert plan.num_reqs == 1


@pytest.mark.parametrize("num_requests", [1, 10])
def test_tokens_behind_a_stop_are_dropped(make_core: MakeCore, num_requests: int) -> None:
    """Alike for few rows, which are walked, and for many, which are columns."""
    driver = Driver(make_core(num_spec_tokens=3, spec_kind="ngram", max_num_seqs=16))
    names = [f"r{key}" for key in range(num_requests)]
    driver.add(*(new_request(key, 4, eos_token_ids=(2,)) for key in range(num_requests)))
    driver.step()
    driver.propose(dict.fromkeys(names, 3))
    output = driver.update(driver.schedule(), {name: [5, 2, 6] for name in names})
    assert output.num_new_tokens.tolist() == [2] * num_requests
    assert output.token_ids.tolist() == [5, 2] * num_requests
    assert len(output.finished) == num_requests


def test_a_pipeline_plans_with_placeholders_and_keeps_no_drafts(make_core: MakeCore) -> None:
    core = make_core(num_spec_tokens=2, spec_kind="draft", pipeline_depth=2)
    driver = Driver(core)
    driver.add(new_request(0, 10, max_tokens=20))
    first, second = driver.schedule(), driver.schedule()
    assert second.num_scheduled_tokens.tolist() == [3]
    assert second.draft_token_ids.tolist() == [-1, -1]
    driver.update(first, {"r0": [5]})
    driver.propose({"r0": 1})
    third = driver.schedule()
    assert third.num_draft_tokens.tolist() == [2]
    driver.update(second, {"r0": [6]})
    assert computed(driver, "r0") == 10 + 3 + 3 - 2
    driver.update(third, {"r0": [7, 8, 9]})


def test_a_pipeline_does_not_plan_past_max_tokens(make_core: MakeCore) -> None:
    driver = Driver(make_core(pipeline_depth=2))
    driver.add(new_request(0, 10, max_tokens=2))
    first, second = driver.schedule(), driver.schedule()
    driver.update(first)
    assert driver.schedule().num_reqs == 0
    assert len(driver.update(second).finished) == 1


def test_no_blocks_are_taken_beyond_max_model_len(make_core: MakeCore) -> None:
    """The drafter looks 3 tokens ahead of 15, but position 16 does not exist."""
    driver = Driver(make_core(num_spec_tokens=3, spec_kind="draft", max_model_len=16))
    driver.add(new_request(0, 14, max_tokens=9))
    assert driver.step().appended_block_ids.tolist() == [1]
    assert driver.step().appended_block_ids.tolist() == []


def test_output_from_before_a_preemption_is_delivered_first(make_core: MakeCore) -> None:
    """r1 falls with a token in flight; it is set aside until that token has come."""
    core = make_core(pipeline_depth=2, num_gpu_blocks=4, enable_prefix_caching=False)
    driver = Driver(core)
    driver.add(new_request(0, 16), new_request(1, 20))
    first = driver.schedule()
    second = driver.schedule()
    assert [victim.request_id for victim in second.facts.victims] == ["r1"]
    output = driver.core.update(
        StepResult(
            step_id=first.step_id,
            num_sampled_tokens=np.array([1, 1], np.int32),
            token_ids=np.array([5, 6], np.int32),
        ),
        0.0,
    )
    assert output.keys.tolist() == [0, 1]
    assert core.output_token_ids(1).tolist() == [6]
    driver.update(second)
    driver.run()


def test_output_from_before_a_cache_reset_is_dropped(make_core: MakeCore) -> None:
    core = make_core(pipeline_depth=2)
    driver = Driver(core)
    driver.add(new_request(0, 16))
    first = driver.schedule()
    outcome = core.reset_prefix_cache(reset_running=True)
    assert outcome.is_reset
    assert outcome.preempted_keys == (0,)
    second = driver.schedule()
    assert second.num_scheduled_tokens.tolist() == [16]
    result = StepResult(
        step_id=first.step_id,
        num_sampled_tokens=np.array([1], np.int32),
        token_ids=np.array([5], np.int32),
    )
    assert core.update(result, 0.0).keys.tolist() == []
    assert driver.update(second).keys.tolist() == [0]


def test_output_to_be_dropped_stays_so_when_its_request_falls_again(make_core: MakeCore) -> None:
    """Its tokens were sampled anew meanwhile: delivering them would give them twice."""
    core = make_core(pipeline_depth=3, num_gpu_blocks=3, enable_prefix_caching=False)
    driver = Driver(core)
    driver.add(new_request(0, 15), new_request(1, 15))
    first = driver.schedule()
    driver.schedule()
    core.reset_prefix_cache(reset_running=True)
    for _ in range(2):
        driver.schedule()
    assert [victim.request_id for victim in driver.schedule().facts.victims] == ["r1"]
    result = StepResult(
        step_id=first.step_id,
        num_sampled_tokens=np.array([1, 1], np.int32),
        token_ids=np.array([5, 6], np.int32),
    )
    assert core.update(result, 0.0).keys.tolist() == []
    assert core.output_token_ids(1).tolist() == []
