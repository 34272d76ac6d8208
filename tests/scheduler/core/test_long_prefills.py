"""Long prefills together leave room for short ones, whatever their number, and still progress."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core.plan import WaitReason
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, check_book, new_request, scheduler_config

MakeCore = Callable[..., SchedulerCore]
BUDGET = 512
LONG = 8000

LIMITS: dict[str, Any] = {
    "num_gpu_blocks": 20_000,
    "max_model_len": 10_000,
    "max_num_batched_tokens": BUDGET,
    "max_num_seqs": 64,
    "long_prefill_token_threshold": BUDGET // 2,
    "long_prefill_share": 0.5,
}


def steps_to_first_token(driver: Driver, key: int, max_steps: int = 10_000) -> int:
    """Steps until a request of the driver's core has its first token."""
    for number in range(1, max_steps):
        driver.step()
        if key in driver.outputs[-1].keys:
            return number
    raise AssertionError("it never gets a token")


@pytest.mark.parametrize("num_long", [1, 2, 3, 20])
def test_a_short_prompt_behind_long_ones_gets_its_first_token_at_once(
    make_core: MakeCore, num_long: int
) -> None:
    driver = Driver(make_core(**LIMITS))
    driver.add(*(new_request(key, LONG) for key in range(num_long)))
    driver.steps(3)
    driver.add(new_request(100, 10))
    assert steps_to_first_token(driver, 100) == 1


@pytest.mark.parametrize("pipeline_depth", [1, 2])
@pytest.mark.parametrize("num_long", [2, 5])
def test_a_decoding_request_behind_long_prefills_gets_a_token_in_every_step(
    make_core: MakeCore, num_long: int, pipeline_depth: int
) -> None:
    driver = Driver(make_core(**LIMITS, pipeline_depth=pipeline_depth))
    driver.add(*(new_request(key, LONG) for key in range(num_long)))
    driver.steps(2)
    driver.add(*(new_request(100 + key, 10, max_tokens=20) for key in range(3)))
    for _ in range(20):
        driver.step()
        assert {100, 101, 102} <= set(driver.outputs[-1].keys)
    # The room that they leave is used.
    assert driver.plans[-2].num_scheduled_tokens.sum() == BUDGET


def test_long_prefills_progress_although_decodes_fill_every_step(make_core: MakeCore) -> None:
    limits = LIMITS | {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 4}
    driver = Driver(make_core(**limits))
    driver.add(new_request(0, 40, max_tokens=1))
    driver.add(*(new_request(key, 1, max_tokens=1000) for key in range(1, 13)))
    assert steps_to_first_token(driver, 0) <= 2 * 40


def test_without_the_share_two_long_prompts_take_every_step(make_core: MakeCore) -> None:
    """As vLLM 0.27.1 does; recordings need it."""
    driver = Driver(make_core(**LIMITS | {"long_prefill_share": 1.0}))
    driver.add(new_request(0, LONG), new_request(1, LONG))
    driver.step()
    driver.add(new_request(2, 10))
    assert steps_to_first_token(driver, 2) > 25


def test_without_short_prompts_long_ones_use_whole_steps(make_core: MakeCore) -> None:
    driver = Driver(make_core(**LIMITS))
    driver.add(*(new_request(key, LONG) for key in range(3)))
    plans = driver.steps(12)
    # The first step cannot know that what waits is long, too.
    assert [plan.num_scheduled_tokens.sum() for plan in plans[1:]] == [BUDGET] * 11


def test_long_prefills_progress_under_a_flood_of_short_ones(make_core: MakeCore) -> None:
    driver = Driver(make_core(**LIMITS))
    driver.add(new_request(0, LONG), new_request(1, LONG))
    num_steps = 0
    while driver.core.state.requests.keys() & {0, 1}:
        first = 10 + 4 * num_steps
        driver.add(*(new_request(key, 200, max_tokens=1) for key in range(first, first + 4)))
        driver.step()
        num_steps += 1
    # Each step gives half of its tokens to them, but for the few decodes.
    assert num_steps <= math.ceil(2 * LONG / (BUDGET / 2 - 32)) + 32


def test_a_step_full_of_decodes_but_for_one_token_serves_long_and_short_by_turns(
    make_core: MakeCore,
) -> None:
    limits = LIMITS | {"max_num_batched_tokens": 8, "long_prefill_token_threshold": 4}
    driver = Driver(make_core(**limits))
    driver.add(*(new_request(key, 1, max_tokens=1000) for key in range(7)))
    driver.step()
    driver.add(new_request(8, 20), new_request(9, 4))
    assert steps_to_first_token(driver, 9) <= 9
    while 8 not in driver.outputs[-1].keys:
        key = 100 + len(driver.plans)
        assert key < 160, "a flood of short prompts starves the long one"
        driver.add(new_request(key, 4, max_tokens=1))
        driver.step()


def test_held_prompts_are_admitted_in_the_order_of_their_arrival(make_core: MakeCore) -> None:
    driver = Driver(make_core(**LIMITS))
    driver.add(*(new_request(key, 1000) for key in range(5)), new_request(9, 600))
    driver.run()
    admitted = [admission.key for plan in driver.plans for admission in plan.admissions]
    assert admitted == [0, 1, 2, 3, 4, 9]


def test_the_more_urgent_of_held_and_waiting_prompts_goes_first(make_core: MakeCore) -> None:
    driver = Driver(make_core(**LIMITS, policy="priority"))
    driver.add(*(new_request(key, 1000, priority=5) for key in range(4)))
    driver.step()
    driver.add(new_request(9, 1000, priority=1))
    driver.run()
    admitted = [admission.key for plan in driver.plans for admission in plan.admissions]
    assert admitted.index(9) < admitted.index(3)


@pytest.mark.parametrize("policy", ["priority", "preemptive_priority"])
def test_a_more_urgent_long_prompt_is_served_before_those_that_run(
    make_core: MakeCore, policy: str
) -> None:
    driver = Driver(make_core(**LIMITS, policy=policy))
    driver.add(new_request(0, LONG, priority=5), new_request(1, LONG, priority=5))
    driver.steps(3)
    driver.add(new_request(2, 2000, priority=1), new_request(3, 2000, priority=2))
    assert steps_to_first_token(driver, 2) <= 2 + math.ceil(2000 / (BUDGET // 2 - 1))
    assert steps_to_first_token(driver, 3) <= 1 + math.ceil(2000 / (BUDGET // 2 - 2))


def test_a_held_prompt_can_be_aborted_paused_and_found(make_core: MakeCore) -> None:
    core = make_core(**LIMITS)
    driver = Driver(core)
    driver.add(*(new_request(key, LONG) for key in range(4)), new_request(5, 10))
    driver.step()
    assert len(core.state.queues.held) == 3
    assert core.num_waiting == 3
    core.abort(1)
    core.pause_request(2)
    check_book(core)
    core.continue_request(2)
    explanation = core.explain("r3")
    assert explanation is not None
    assert explanation.queue_position is not None
    driver.run()


def test_explain_names_the_long_prefills_that_a_request_waits_for(make_core: MakeCore) -> None:
    driver = Driver(make_core(**LIMITS))
    driver.add(new_request(0, LONG), new_request(1, LONG))
    for key in range(2, 12):
        driver.add(new_request(key, 20, max_tokens=1))
        driver.step()
    explanation = driver.core.explain("r1")
    assert explanation is not None
    assert explanation.steps_waited_by_cause[WaitReason.LONG_PREFILLS] == 10
    assert "other long prefills have their share" in explanation.events[-1].detail


def test_explain_counts_the_steps_in_which_a_running_prefill_got_nothing(
    make_core: MakeCore,
) -> None:
    driver = Driver(make_core(**LIMITS))
    driver.add(new_request(0, LONG), new_request(1, LONG))
    driver.steps(2)
    for key in range(2, 7):
        driver.add(new_request(key, 20, max_tokens=1))
        driver.step()
    explanation = driver.core.explain("r1")
    assert explanation is not None
    assert "5 more spent behind other long prefills" in explanation.events[-1].detail


@given(
    num_long=st.integers(1, 30),
    num_decoding=st.integers(0, 40),
    num_tokens_ahead=st.lists(st.integers(1, BUDGET // 2), max_size=6),
    num_tokens=st.integers(1, BUDGET // 2),
    num_steps_before=st.integers(1, 5),
    share=st.sampled_from([0.1, 0.5, 0.9]),
    policy=st.sampled_from(["fcfs", "priority"]),
    pipeline_depth=st.sampled_from([1, 2]),
)
def test_the_first_token_of_a_short_prompt_comes_within_the_bound(
    num_long: int,
    num_decoding: int,
    num_tokens_ahead: list[int],
    num_tokens: int,
    num_steps_before: int,
    share: float,
    policy: str,
    pipeline_depth: int,
) -> None:
    """The bound that docs/scheduling-core.md states."""
    limits = LIMITS | {"long_prefill_share": share, "max_num_seqs": 100, "policy": policy}
    config = scheduler_config(**limits, pipeline_depth=pipeline_depth)
    driver = Driver(SchedulerCore(config))
    driver.add(*(new_request(key, 1, max_tokens=5000) for key in range(num_decoding)))
    driver.step()
    driver.add(*(new_request(1000 + n, LONG) for n in range(num_long)))
    driver.steps(num_steps_before)
    ahead = [new_request(2000 + n, count) for n, count in enumerate(num_tokens_ahead)]
    driver.add(*ahead, new_request(3000, num_tokens))
    # Those ahead decode once their prefill is done.
    room = BUDGET - num_decoding - len(ahead)
    bound = math.ceil((sum(num_tokens_ahead) + num_tokens + 1) / (room * (1 - share)))
    assert steps_to_first_token(driver, 3000) <= bound
    check_book(driver.core)
