"""Requests whose clients do not read: set aside without blocks, and brought back."""

from collections.abc import Callable

import pytest

from scheduler.core.plan import RequestStatus, WaitReason
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


def status_of(core: SchedulerCore, key: int) -> RequestStatus:
    return core.state.requests[key].status


def test_a_paused_request_gives_up_its_row_and_its_blocks_and_others_go_on(
    make_core: MakeCore,
) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, 40), new_request(1, 40))
    driver.steps(3)
    num_free = core.num_free_blocks
    assert core.pause_request(0) == 42
    assert status_of(core, 0) is RequestStatus.WAITING_FOR_CLIENT
    assert (core.num_running, core.num_waiting, core.num_paused) == (1, 0, 1)
    assert core.num_free_blocks == num_free + 3
    for plan in driver.steps(5):
        assert driver.scheduled(plan) == {"r1": 1}
        assert not plan.facts.passed_over


def test_a_short_pause_costs_little_for_the_full_blocks_are_still_cached(
    make_core: MakeCore,
) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, 40))
    driver.steps(4)
    core.pause_request(0)
    driver.steps(2)
    core.continue_request(0)
    plan = driver.schedule()
    (admission,) = plan.admissions
    assert (admission.num_cached_tokens, admission.is_resumed) == (32, True)
    # Of 40 prompt tokens and 4 that were generated.
    assert driver.scheduled(plan) == {"r0": 44 - 32}
    driver.update(plan)
    driver.run()


def test_it_generates_as_many_tokens_as_without_a_pause(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, max_tokens=12))
    for _ in range(12):
        driver.step()
        core.pause_request(0)
        driver.step()
        core.continue_request(0)
    assert not core.has_unfinished
    assert sum(int(output.num_new_tokens.sum()) for output in driver.outputs) == 12
    (finished,) = driver.outputs[-2].finished
    assert finished.num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_of_steps_in_flight_are_still_delivered(make_core: MakeCore, depth: int) -> None:
    core = make_core(pipeline_depth=depth)
    driver = Driver(core)
    driver.add(new_request(0))
    plans = [driver.schedule() for _ in range(depth)]
    results = [driver.result(plan, {}) for plan in plans]
    core.pause_request(0)
    for result in results:
        assert core.update(result, 0.0).num_new_tokens.tolist() == [1]
    assert core.output_token_ids(0).tolist() == [7] * depth
    core.continue_request(0)
    driver.step()
    assert len(core.output_token_ids(0)) == depth + 1


def test_a_continued_request_waits_until_its_tokens_in_flight_are_there(
    make_core: MakeCore,
) -> None:
    core = make_core(pipeline_depth=2)
    driver = Driver(core)
    driver.add(new_request(0))
    first = driver.schedule()
    result = driver.result(first, {})
    core.pause_request(0)
    core.continue_request(0)
    facts = driver.schedule().facts
    assert [fact.reason for fact in facts.passed_over] == [WaitReason.OUTPUT_IN_FLIGHT]
    core.update(result, 0.0)
    assert driver.scheduled(driver.schedule()) == {"r0": 11}


def test_it_may_end_while_it_is_paused_with_what_was_in_flight(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, max_tokens=1))
    result = driver.result(driver.schedule(), {})
    core.pause_request(0)
    (finished,) = core.update(result, 0.0).finished
    assert finished.status is RequestStatus.LENGTH_CAPPED
    assert not core.has_unfinished
    core.continue_request(0)


def test_its_deadline_ends_it_while_it_is_paused(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, deadline=5.0), new_request(1))
    driver.step()
    core.pause_request(0)
    driver.now = 6.0
    (expired,) = driver.step().expired
    assert (expired.key, expired.status) == (0, RequestStatus.DEADLINE)


def test_it_can_be_aborted_while_it_is_paused(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0))
    driver.step()
    core.pause_request(0)
    assert core.abort(0) is not None
    assert (core.num_paused, core.has_unfinished) == (0, False)
    driver.step()


def test_under_fcfs_it_comes_back_at_the_head(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1)
    driver = Driver(core)
    driver.add(*(new_request(key) for key in range(3)))
    driver.step()
    core.pause_request(0)
    assert driver.scheduled(driver.step()) == {"r1": 10}
    core.continue_request(0)
    core.abort(1)
    assert list(driver.scheduled(driver.step())) == ["r0"]


def test_under_priority_it_comes_back_where_its_priority_puts_it(make_core: MakeCore) -> None:
    core = make_core(max_num_seqs=1, policy="priority")
    driver = Driver(core)
    driver.add(*(new_request(key, priority=priority) for key, priority in enumerate((5, 9, 1, 7))))
    driver.step()
    core.pause_request(2)
    driver.step()
    core.continue_request(2)
    core.abort(0)
    assert list(driver.scheduled(driver.step())) == ["r2"]


def test_a_waiting_request_is_set_aside_too_and_holds_nobody_up(make_core: MakeCore) -> None:
    core = make_core(num_gpu_blocks=5)
    driver = Driver(core)
    driver.add(new_request(0, 40), new_request(1, 40), new_request(2, 5))
    assert driver.scheduled(driver.step()) == {"r0": 40}
    assert core.pause_request(1) is None
    assert driver.scheduled(driver.step()) == {"r0": 1, "r2": 5}
    core.continue_request(1)
    driver.run()


def test_a_grammar_may_come_while_it_is_paused(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, needs_grammar=True), new_request(1, needs_grammar=True))
    core.pause_request(0)
    core.pause_request(1)
    core.mark_ready("r0")
    core.continue_request(0)
    core.continue_request(1)
    assert list(driver.scheduled(driver.step())) == ["r0"]
    assert status_of(core, 1) is RequestStatus.WAITING_FOR_GRAMMAR


def test_pausing_twice_or_nobody_changes_nothing(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0))
    driver.step()
    assert [core.pause_request(key) for key in (0, 0, 9)] == [10, None, None]
    core.continue_request(0)
    core.continue_request(0)
    core.continue_request(9)
    assert (core.num_waiting, core.num_paused) == (1, 0)


def test_the_explanation_says_that_its_client_did_not_read(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0, 20, max_tokens=4))
    driver.steps(2)
    core.pause_request(0)
    driver.steps(3)
    explanation = core.explain("r0")
    assert explanation is not None
    assert explanation.status is RequestStatus.WAITING_FOR_CLIENT
    assert explanation.queue_position is None
    core.continue_request(0)
    driver.run()
    explanation = core.explain("r0")
    assert explanation is not None
    assert [(e.kind.name, e.first_step, e.last_step, e.detail) for e in explanation.events] == [
        ("ADDED", 0, 0, "queued behind 0 others"),
        ("ADMITTED", 0, 0, "admitted with 0 tokens from the prefix cache"),
        ("SCHEDULED", 0, 1, "computed 21 tokens"),
        ("PAUSED", 2, 2, "paused: its client does not read; 21 computed tokens lost"),
        ("WAITED", 2, 4, "waited 3 steps: its client does not read"),
        ("CONTINUED", 5, 5, "its client reads again"),
        ("ADMITTED", 5, 5, "resumed with 16 tokens from the prefix cache"),
        ("SCHEDULED", 5, 6, "computed 7 tokens"),
        ("FINISHED", 7, 7, "ended as LENGTH_CAPPED"),
    ]
    assert explanation.steps_waited_by_cause == {WaitReason.CLIENT: 3}
    assert (explanation.num_preemptions, explanation.num_recomputed_tokens) == (0, 21)
