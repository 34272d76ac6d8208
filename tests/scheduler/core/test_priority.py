"""Victims under policy priority, and preemption on behalf of a waiting request."""

from collections.abc import Callable
from typing import Any

import pytest

from scheduler.core.plan import WaitReason
from scheduler.core.policy import policy_name
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


def make_driver(make_core: MakeCore, **fields: Any) -> Driver:
    fields = {"policy": "priority", "enable_prefix_caching": False} | fields
    return Driver(make_core(**fields))


def test_the_least_urgent_falls_and_gives_its_tokens_back(make_core: MakeCore) -> None:
    """r0 is the oldest and least urgent: it has been served, with a block, when r1 needs one."""
    driver = make_driver(make_core, num_gpu_blocks=4, max_num_batched_tokens=17)
    driver.add(new_request(0, 15, priority=5))
    driver.step()
    driver.add(new_request(1, 16, priority=1))
    driver.step()
    plan = driver.schedule()
    assert driver.scheduled(plan) == {"r1": 1}
    (victim,) = plan.facts.victims
    assert (victim.request_id, victim.trigger_id, victim.was_scheduled) == ("r0", "r1", True)
    assert (victim.num_needed_blocks, victim.num_lost_tokens) == (1, 16)
    assert plan.preempted_keys == (0,)
    assert plan.freed_rows.tolist() == [0]
    assert plan.appended_block_rows.tolist() == [1]
    driver.update(plan)


def test_of_equals_the_first_in_the_running_order_falls(make_core: MakeCore) -> None:
    driver = make_driver(make_core, num_gpu_blocks=4)
    same = {"priority": 1, "arrival_time": 3.0}
    driver.add(new_request(0, 16, **same), new_request(1, 16, **same), new_request(2, 16, **same))
    driver.step()
    plan = driver.schedule()
    assert [victim.request_id for victim in plan.facts.victims] == ["r0"]
    driver.update(plan)


def test_those_behind_a_request_that_falls_itself_get_nothing(make_core: MakeCore) -> None:
    """As vLLM 0.27.1: r1 gets nothing in this step, though it needs no block."""
    driver = make_driver(make_core, num_gpu_blocks=3)
    driver.add(new_request(0, 15, priority=9))
    driver.step()
    driver.add(new_request(1, 10, priority=0))
    driver.step()
    plan = driver.schedule()
    assert [victim.trigger_id for victim in plan.facts.victims] == ["r0"]
    assert driver.scheduled(plan) == {}
    assert driver.core.num_running == 1
    driver.update(plan)
    assert driver.scheduled(driver.schedule()) == {"r1": 1}


def test_a_victim_that_was_passed_over_costs_another_its_turn(make_core: MakeCore) -> None:
    """As vLLM 0.27.1: r0, throttled, falls for r1; r2 moves up to r1's place and is missed."""
    driver = make_driver(make_core, num_gpu_blocks=5, long_prefill_token_threshold=8)
    driver.add(new_request(0, 40, priority=9))
    driver.step()
    driver.add(*(new_request(key, length) for key, length in ((1, 8), (2, 7), (3, 6))))
    driver.step()
    for _ in range(8):
        plan = driver.core.schedule(0.0, throttle_prefills=True)
        assert driver.scheduled(plan) == {"r1": 1, "r2": 1, "r3": 1}
        driver.update(plan)
    plan = driver.core.schedule(0.0, throttle_prefills=True)
    assert [(v.request_id, v.was_scheduled) for v in plan.facts.victims] == [("r0", False)]
    assert driver.scheduled(plan) == {"r1": 1, "r3": 1}
    driver.update(plan)


def test_an_urgent_request_waits_when_preemption_for_it_is_off(make_core: MakeCore) -> None:
    driver = make_driver(make_core, max_num_seqs=1)
    driver.add(new_request(0, priority=5))
    driver.step()
    driver.add(new_request(1, priority=0))
    plan = driver.step()
    assert driver.scheduled(plan) == {"r0": 1}
    assert plan.facts.passed_over[0].reason is WaitReason.SEQUENCE_SLOTS


@pytest.mark.parametrize(
    ("what", "limits"),
    [
        ("slot", {"max_num_seqs": 2}),
        ("budget", {"max_num_batched_tokens": 2, "long_prefill_token_threshold": 1}),
    ],
)
def test_an_urgent_request_displaces_the_least_urgent(
    make_core: MakeCore, what: str, limits: dict[str, int]
) -> None:
    driver = make_driver(make_core, policy="preemptive_priority", **limits)
    length = 1 if what == "budget" else 16
    driver.add(new_request(0, length, priority=5), new_request(1, length, priority=4))
    driver.step()
    driver.add(new_request(2, length, priority=0))
    plan = driver.schedule()
    victims = [(victim.request_id, victim.trigger_id) for victim in plan.facts.victims]
    assert victims == [("r0", "r2")]
    assert driver.scheduled(plan) == {"r1": 1, "r2": length}
    driver.update(plan)
    driver.run()


def test_an_urgent_request_displaces_as_many_as_it_needs(make_core: MakeCore) -> None:
    driver = make_driver(make_core, policy="preemptive_priority", num_gpu_blocks=6)
    driver.add(*(new_request(key, 12, priority=5) for key in range(5)))
    driver.step()
    driver.add(new_request(9, 40, priority=0))
    plan = driver.step()
    assert [victim.request_id for victim in plan.facts.victims] == ["r4", "r3", "r2"]
    assert [(v.num_needed_blocks, v.was_scheduled) for v in plan.facts.victims] == [(3, True)] * 3
    assert driver.scheduled(plan) == {"r0": 1, "r1": 1, "r9": 40}


def test_equal_priorities_never_displace_each_other(make_core: MakeCore) -> None:
    driver = make_driver(make_core, policy="preemptive_priority", max_num_seqs=1)
    driver.add(new_request(0, priority=3, arrival_time=9.0))
    driver.step()
    driver.add(new_request(1, priority=3, arrival_time=0.0))
    plan = driver.step()
    assert driver.scheduled(plan) == {"r0": 1}
    assert not plan.facts.victims


def test_who_was_displaced_does_not_come_back_in_the_same_step(make_core: MakeCore) -> None:
    driver = make_driver(make_core, policy="preemptive_priority", max_num_seqs=2)
    driver.add(new_request(0, priority=5), new_request(1, priority=5))
    driver.step()
    driver.add(new_request(2, priority=0, max_tokens=1))
    plan = driver.step()
    assert [victim.request_id for victim in plan.facts.victims] == ["r1"]
    assert [one.request_id for one in plan.admissions] == ["r2"]
    assert plan.facts.passed_over[-1].request_id == "r1"
    # r2 is done: now it comes back.
    assert [one.request_id for one in driver.step().admissions] == ["r1"]


def test_who_was_displaced_stays_out_though_a_first_chunk_would_fit(make_core: MakeCore) -> None:
    driver = make_driver(
        make_core,
        policy="preemptive_priority",
        num_gpu_blocks=6,
        reserve_full_sequence=False,
        long_prefill_token_threshold=16,
    )
    driver.add(new_request(0, 64, priority=5))
    driver.steps(5)
    assert driver.core.num_free_blocks == 0
    driver.add(new_request(1, 40, priority=0))
    plan = driver.step()
    assert plan.preempted_keys == (0,)
    assert driver.scheduled(plan) == {"r1": 16}
    assert driver.core.num_free_blocks == 4
    assert [fact.reason for fact in plan.facts.passed_over] == [WaitReason.PREEMPTION]


def test_nobody_is_displaced_when_that_would_not_be_enough(make_core: MakeCore) -> None:
    """r1 holds most blocks and is as urgent as r2: r0's one block would not help."""
    driver = make_driver(make_core, policy="preemptive_priority", num_gpu_blocks=7)
    driver.add(new_request(0, 10, priority=5), new_request(1, 70, priority=0))
    driver.step()
    driver.add(new_request(2, 30, priority=0))
    plan = driver.step()
    assert not plan.facts.victims
    assert plan.facts.passed_over[0].reason is WaitReason.BLOCKS


def test_no_slot_is_taken_for_a_request_that_lacks_blocks_all_the_same(
    make_core: MakeCore,
) -> None:
    """r0's slot and block would be free, but r1, as urgent as r2, holds most blocks."""
    driver = make_driver(make_core, policy="preemptive_priority", num_gpu_blocks=7, max_num_seqs=2)
    driver.add(new_request(0, 10, priority=5), new_request(1, 60, priority=0))
    driver.step()
    driver.add(new_request(2, 40, priority=0))
    plan = driver.step()
    assert not plan.facts.victims
    assert plan.facts.passed_over[0].reason is WaitReason.SEQUENCE_SLOTS


def test_under_fcfs_nobody_is_displaced(make_core: MakeCore) -> None:
    policy = policy_name("fcfs", displaces=True)
    driver = Driver(make_core(policy=policy, max_num_seqs=1))
    driver.add(new_request(0, priority=5))
    driver.step()
    driver.add(new_request(1, priority=0))
    assert driver.scheduled(driver.step()) == {"r0": 1}


def test_blocks_that_a_displaced_request_was_to_fill_in_this_step_are_not_found_later(
    make_core: MakeCore,
) -> None:
    core = make_core(policy="preemptive_priority", max_num_seqs=1, max_num_batched_tokens=64)
    driver = Driver(core)
    driver.add(new_request(0, 200, priority=5))
    driver.step()
    driver.add(new_request(1, priority=0, max_tokens=1))
    (victim,) = driver.step().facts.victims
    assert (victim.request_id, victim.was_scheduled) == ("r0", True)
    (admission,) = driver.step().admissions
    # Of its second chunk of 64 tokens nothing was computed.
    assert (admission.request_id, admission.num_cached_tokens) == ("r0", 64)
    driver.run()


def test_a_request_is_not_displaced_while_a_request_of_this_step_needs_what_it_writes(
    make_core: MakeCore,
) -> None:
    core = make_core(policy="preemptive_priority", max_num_seqs=2, max_num_batched_tokens=128)
    driver = Driver(core)
    prompt = new_request(7, 200).prompt_token_ids
    driver.add(new_request(0, prompt_token_ids=prompt, priority=9))
    driver.step()
    # The first finds what the second chunk of r0 writes, the second wants r0's slot.
    driver.add(new_request(1, prompt_token_ids=prompt.copy(), priority=1))
    driver.add(new_request(2, priority=2))
    plan = driver.step()
    assert [admission.request_id for admission in plan.admissions] == ["r1"]
    assert plan.admissions[0].num_cached_tokens > 128
    assert not plan.facts.victims
    (victim,) = driver.step().facts.victims
    assert victim.request_id == "r0"
    driver.run()
