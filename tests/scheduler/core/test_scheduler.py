from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scheduler.core.block_hash import BlockHashes
from scheduler.core.plan import Pause, RequestStatus, StepResult, WaitReason
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


def test_a_plan_places_a_request_and_gives_it_blocks(make_core: MakeCore) -> None:
    driver = Driver(make_core())
    request = new_request(3, 20)
    driver.add(request)
    plan = driver.schedule()
    (placed,) = plan.row_requests
    assert (placed.row, placed.key, placed.request_id, placed.num_prompt_tokens) == (0, 3, "r3", 20)
    assert placed.token_ids.tolist() == request.prompt_token_ids.tolist()
    assert plan.appended_block_rows.tolist() == [0, 0]
    assert plan.appended_block_ids.tolist() == [1, 2]
    assert plan.num_computed_tokens.tolist() == [0]
    assert plan.num_scheduled_tokens.tolist() == [20]
    assert (plan.num_reqs, plan.is_worth_sending) == (1, True)


def test_a_decode_costs_one_token_and_seldom_a_block(make_core: MakeCore) -> None:
    driver = Driver(make_core())
    driver.add(new_request(0, 15))
    plans = driver.steps(3)
    assert [plan.num_scheduled_tokens.tolist() for plan in plans] == [[15], [1], [1]]
    assert [plan.appended_block_ids.tolist() for plan in plans] == [[1], [], [2]]
    assert [len(plan.row_requests) for plan in plans] == [1, 0, 0]


def test_outputs_are_columns_over_the_requests_that_got_tokens(make_core: MakeCore) -> None:
    driver = Driver(make_core(max_num_batched_tokens=32))
    driver.add(new_request(5, 10), new_request(6, 40))
    output = driver.update(driver.schedule(), {"r5": [9]})
    assert output.keys.tolist() == [5]
    assert output.num_new_tokens.tolist() == [1]
    assert output.token_ids.tolist() == [9]


def test_the_row_of_who_ended_is_freed_by_the_next_plan_that_is_sent(make_core: MakeCore) -> None:
    driver = Driver(make_core())
    driver.add(new_request(0, max_tokens=1))
    driver.step()
    (finished,) = driver.outputs[-1].finished
    assert (finished.key, finished.status) == (0, RequestStatus.LENGTH_CAPPED)
    assert not driver.step().is_worth_sending
    driver.add(new_request(1))
    plan = driver.step()
    assert plan.is_worth_sending
    assert plan.freed_rows.tolist() == [0]


def test_a_freed_row_does_not_wait_long_for_a_plan_to_go_with(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, max_tokens=1))
    driver.step()
    assert not driver.step().is_worth_sending
    assert core.has_news
    driver.now += 1.0
    plan = driver.step()
    assert plan.is_worth_sending
    assert plan.freed_rows.tolist() == [0]
    assert not core.has_news


def test_a_freed_row_may_be_used_again_by_the_same_plan(make_core: MakeCore) -> None:
    driver = Driver(make_core(max_num_seqs=1))
    driver.add(new_request(0, max_tokens=1), new_request(1))
    driver.step()
    plan = driver.step()
    assert plan.freed_rows.tolist() == [0]
    assert [placed.request_id for placed in plan.row_requests] == ["r1"]


def test_generated_tokens_of_an_earlier_epoch_count_as_output(make_core: MakeCore) -> None:
    driver = Driver(make_core())
    driver.add(new_request(0, 10, output_token_ids=np.array([4, 5], np.int32), max_tokens=3))
    plan = driver.step()
    assert plan.num_scheduled_tokens.tolist() == [12]
    assert plan.row_requests[0].token_ids.tolist()[-2:] == [4, 5]
    assert driver.outputs[-1].finished[0].status is RequestStatus.LENGTH_CAPPED


def test_an_abort_frees_blocks_at_once_and_its_output_is_ignored(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0), new_request(1))
    plan = driver.schedule()
    finished = core.abort(0)
    assert finished is not None
    assert finished.status is RequestStatus.ABORTED
    assert core.num_free_blocks == 99
    assert driver.update(plan).keys.tolist() == [1]
    assert core.abort(0) is None


def test_an_abort_may_carry_another_status(make_core: MakeCore) -> None:
    core = make_core()
    Driver(core).add(new_request(0))
    finished = core.abort(0, RequestStatus.STOPPED)
    assert finished is not None
    assert finished.status is RequestStatus.STOPPED


def test_a_failed_row_ends_as_error_and_the_others_go_on(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0), new_request(1))
    plan = driver.schedule()
    result = StepResult(
        step_id=plan.step_id,
        num_sampled_tokens=np.array([1, 1], np.int32),
        token_ids=np.array([7, 8], np.int32),
        failed_rows=(0,),
    )
    output = core.update(result, 0.0)
    assert [(one.key, one.status) for one in output.finished] == [(0, RequestStatus.ERROR)]
    assert (output.keys.tolist(), output.token_ids.tolist()) == ([1], [8])


def test_what_a_failed_request_computed_is_not_reused(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    prompt = new_request(0, 40).prompt_token_ids
    driver.add(new_request(0, prompt_token_ids=prompt))
    plan = driver.schedule()
    result = StepResult(
        step_id=plan.step_id,
        num_sampled_tokens=np.array([0], np.int32),
        token_ids=np.array([], np.int32),
        failed_rows=(0,),
    )
    core.update(result, 0.0)
    driver.add(new_request(1, prompt_token_ids=prompt.copy()))
    (admission,) = driver.step().admissions
    assert admission.num_cached_tokens == 0


@pytest.mark.parametrize("step", [1, 3])
def test_an_expired_request_ends_as_deadline(make_core: MakeCore, step: int) -> None:
    """Waiting or running: with step 1 it expires before any prefill."""
    core = make_core(max_num_seqs=1)
    driver = Driver(core)
    if step == 1:
        driver.add(new_request(9))
    driver.add(new_request(0, deadline=float(step)))
    for now in range(step):
        driver.now = float(now)
        driver.step()
    driver.now = float(step)
    plan = driver.schedule()
    assert [(one.key, one.status) for one in plan.expired] == [(0, RequestStatus.DEADLINE)]
    assert core.num_running == (1 if step == 1 else 0)
    driver.update(plan)


def test_deadlines_hold_while_paused_and_die_with_their_request(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, deadline=1.0), new_request(1, deadline=2.0))
    core.abort(1)
    driver.add(new_request(1))
    core.set_pause(Pause.PAUSED_ALL)
    driver.now = 5.0
    assert [one.key for one in driver.step().expired] == [0]


def test_deadlines_of_requests_that_ended_early_take_no_memory(make_core: MakeCore) -> None:
    core = make_core()
    core.add_request(new_request(0, deadline=1.0), 0.0)
    for key in range(1, 2_000):
        core.add_request(new_request(key, 1, deadline=3600.0), 0.0)
        core.abort(key)
        assert len(core.state._deadlines._heap) < 32


@pytest.mark.parametrize(
    ("fields", "num_prompt_tokens", "message"),
    [
        ({}, 511, None),
        ({}, 512, "max_model_len = 512"),
        ({}, 0, "the prompt is empty"),
        ({"num_gpu_blocks": 5}, 64, None),
        ({"num_gpu_blocks": 5}, 65, "needs 5 KV blocks; there are 4"),
        ({"enable_chunked_prefill": False}, 129, None),
    ],
)
def test_what_can_never_fit_is_refused(
    make_core: MakeCore, fields: dict[str, Any], num_prompt_tokens: int, message: str | None
) -> None:
    refusal = make_core(**fields).refusal(num_prompt_tokens, 10)
    if message is None:
        assert refusal is None
    else:
        assert refusal is not None
        assert message in refusal


def test_a_lone_request_that_fills_the_pool_ends_with_length(make_core: MakeCore) -> None:
    """4 blocks hold 64 tokens, and the 65th needs no KV."""
    core = make_core(num_gpu_blocks=5)
    driver = Driver(core)
    driver.add(new_request(0, 40, max_tokens=100))
    driver.run(max_steps=100)
    (finished,) = driver.outputs[-1].finished
    assert finished.status is RequestStatus.LENGTH_CAPPED
    assert sum(len(output.token_ids) for output in driver.outputs) == 25


def test_without_chunking_a_preempted_request_that_outgrew_the_budget_still_returns(
    make_core: MakeCore,
) -> None:
    core = make_core(max_num_batched_tokens=32, enable_chunked_prefill=False)
    driver = Driver(core)
    driver.add(new_request(0, 30, max_tokens=40))
    driver.steps(20)
    core.reset_prefix_cache(reset_running=True)
    driver.run(max_steps=100)
    assert driver.outputs[-1].finished[0].status is RequestStatus.LENGTH_CAPPED


def test_grammar_requests_hold_nobody_up_until_they_are_ready(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, needs_grammar=True), new_request(1))
    plan = driver.schedule()
    assert driver.scheduled(plan) == {"r1": 10}
    assert plan.facts.passed_over[0].reason is WaitReason.GRAMMAR
    driver.update(plan)
    core.mark_ready("r0")
    core.mark_ready("unknown")
    assert driver.scheduled(driver.schedule()) == {"r1": 1, "r0": 10}


def test_a_request_that_waits_for_its_grammar_does_not_lift_the_throttle(
    make_core: MakeCore,
) -> None:
    """Prefills are let through when capacity left somebody waiting, not when a grammar did."""
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0), new_request(1, needs_grammar=True))
    driver.step()
    driver.add(new_request(2))
    plan = core.schedule(0.0, throttle_prefills=True)
    assert driver.scheduled(plan) == {"r0": 1}
    assert plan.facts.passed_over[-1].reason is WaitReason.THROTTLED
    driver.update(plan)


def test_only_the_waiting_queue_tells_that_capacity_is_used_up(make_core: MakeCore) -> None:
    """As vLLM 0.27.1: r1, passed over for its grammar and then too long, does not count."""
    core = make_core(num_gpu_blocks=6)
    driver = Driver(core)
    driver.add(new_request(0, 40), new_request(1, 50, needs_grammar=True))
    driver.step()
    core.mark_ready("r1")
    assert driver.step().facts.passed_over[0].reason is WaitReason.BLOCKS
    plan = core.schedule(0.0, throttle_prefills=True)
    assert plan.facts.passed_over[0].reason is WaitReason.THROTTLED
    driver.update(plan)


@pytest.mark.parametrize(("num_prompt_tokens", "is_admitted"), [(1, True), (2, False)])
def test_throttled_prefills_let_through_who_needs_one_token(
    make_core: MakeCore, num_prompt_tokens: int, is_admitted: bool
) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0))
    driver.step()
    driver.add(new_request(1, num_prompt_tokens))
    plan = core.schedule(0.0, throttle_prefills=True)
    assert ("r1" in driver.scheduled(plan)) is is_admitted
    driver.update(plan)


def test_prefills_are_not_throttled_when_nobody_decodes(make_core: MakeCore) -> None:
    core = make_core(max_num_batched_tokens=16)
    driver = Driver(core)
    driver.add(new_request(0, 40))
    driver.step()
    plan = core.schedule(0.0, throttle_prefills=True)
    assert driver.scheduled(plan) == {"r0": 16}
    driver.update(plan)


def test_a_draft_model_needs_room_ahead_of_the_tokens(make_core: MakeCore) -> None:
    """16 tokens fill a block; three more slots are needed for the drafter's own KV."""
    for kind, num_blocks in (("ngram", 1), ("draft", 2), ("eagle", 2)):
        driver = Driver(make_core(num_spec_tokens=3, spec_kind=kind, num_gpu_blocks=4))
        driver.add(new_request(0, 20), new_request(1, 16))
        plan = driver.step()
        assert plan.appended_block_rows.tolist().count(1) == (1 if kind == "ngram" else 0)
        reasons = [fact.reason for fact in plan.facts.passed_over]
        assert reasons == ([] if num_blocks == 1 else [WaitReason.BLOCKS])


def test_pauses(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0))
    driver.step()
    driver.add(new_request(1))
    core.set_pause(Pause.PAUSED_NEW)
    plan = driver.step()
    assert driver.scheduled(plan) == {"r0": 1}
    assert plan.facts.passed_over[0].reason is WaitReason.PAUSED
    core.set_pause(Pause.PAUSED_ALL)
    assert driver.step().num_reqs == 0
    core.set_pause(Pause.UNPAUSED)
    assert driver.scheduled(driver.step()) == {"r0": 1, "r1": 10}


def test_prompts_hashed_ahead_are_found_like_others(make_core: MakeCore) -> None:
    driver = Driver(make_core())
    first = new_request(0, 64)
    hashes = BlockHashes(16)
    hashes.advance(first.prompt_token_ids, num_blocks=2)
    driver.add(first)
    driver.step()
    driver.add(new_request(1, prompt_token_ids=first.prompt_token_ids.copy(), block_hashes=hashes))
    assert driver.step().admissions[0].num_cached_tokens == 48


@pytest.mark.parametrize("hashes", [BlockHashes(8), BlockHashes(16, "salt")])
def test_prompts_hashed_ahead_under_other_terms_are_not_taken(
    make_core: MakeCore, hashes: BlockHashes
) -> None:
    with pytest.raises(AssertionError, match="under other terms"):
        Driver(make_core()).add(new_request(0, block_hashes=hashes))


def test_a_result_must_belong_to_the_oldest_plan(make_core: MakeCore) -> None:
    core = make_core(pipeline_depth=2)
    driver = Driver(core)
    driver.add(new_request(0))
    first, second = driver.schedule(), driver.schedule()
    with pytest.raises(AssertionError, match="step 1 is not 0"):
        driver.update(second)
    assert driver.update(first).keys.tolist() == [0]


def test_many_stop_ids_stop_as_few_do(make_core: MakeCore) -> None:
    driver = Driver(make_core())
    driver.add(
        new_request(0, stop_token_ids=tuple(range(100, 140))),
        new_request(1, stop_token_ids=(100, 101, 102)),
        new_request(2, eos_token_ids=(100,)),
        new_request(3),
    )
    driver.step()
    driver.step({name: [102] for name in ("r0", "r1", "r2", "r3")})
    finished = {one.key: one.stop_token_id for one in driver.outputs[-1].finished}
    assert finished == {0: 102, 1: 102}
    driver.step({name: [100] for name in ("r2", "r3")})
    assert [one.key for one in driver.outputs[-1].finished] == [2]
