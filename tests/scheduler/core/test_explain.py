from collections.abc import Callable

import numpy as np

from scheduler.core.explain import MAX_FIRST_EVENTS, MAX_LAST_EVENTS, EventKind, History, Ledger
from scheduler.core.plan import PassedOver, RequestStatus, WaitReason
from scheduler.core.scheduler import SchedulerCore
from tests.scheduler.core.building import Driver, new_request

MakeCore = Callable[..., SchedulerCore]


def test_a_timeline_tells_what_happened_and_why(make_core: MakeCore) -> None:
    """r1 waits for a slot, runs in two chunks, falls, comes back and ends."""
    core = make_core(max_num_seqs=1, max_num_batched_tokens=32)
    driver = Driver(core)
    driver.add(new_request(0, max_tokens=3), new_request(1, 40, max_tokens=4))
    for now in range(5):
        driver.now = float(now)
        driver.step()
    core.reset_prefix_cache(reset_running=True)
    driver.run()
    explanation = core.explain("r1")
    assert explanation is not None
    assert [(e.kind.name, e.first_step, e.last_step, e.detail) for e in explanation.events] == [
        ("ADDED", 0, 0, "queued behind 1 others"),
        ("WAITED", 0, 2, "waited 3 steps: max_num_seqs are running"),
        ("ADMITTED", 3, 3, "admitted with 0 tokens from the prefix cache"),
        ("SCHEDULED", 3, 4, "computed 40 tokens, prefill in 2 steps"),
        ("PREEMPTED", 5, 5, "preempted: cache reset; 40 computed tokens lost"),
        ("ADMITTED", 5, 5, "resumed with 0 tokens from the prefix cache"),
        ("SCHEDULED", 5, 8, "computed 43 tokens, prefill in 2 steps"),
        ("FINISHED", 9, 9, "ended as LENGTH_CAPPED"),
    ]
    assert explanation.status is RequestStatus.LENGTH_CAPPED
    assert explanation.steps_waited_by_cause == {WaitReason.SEQUENCE_SLOTS: 3}
    assert (explanation.num_preemptions, explanation.num_recomputed_tokens) == (1, 40)
    assert explanation.num_granted_tokens == 83


def test_a_running_request_is_explained_up_to_now(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    driver.add(new_request(0))
    driver.steps(3)
    explanation = core.explain("r0")
    assert explanation is not None
    assert explanation.status is RequestStatus.RUNNING
    assert explanation.queue_position is None
    last = explanation.events[-1]
    assert (last.kind, last.first_step, last.last_step) == (EventKind.SCHEDULED, 0, 2)
    assert last.num_tokens == explanation.num_granted_tokens == 12


def test_a_waiting_request_is_explained_by_its_place_and_cause(make_core: MakeCore) -> None:
    core = make_core(num_gpu_blocks=5)
    driver = Driver(core)
    driver.add(new_request(0, 40), new_request(1, 40), new_request(2, 5))
    driver.steps(2)
    head, behind = core.explain("r1"), core.explain("r2")
    assert head is not None
    assert behind is not None
    assert (head.queue_position, behind.queue_position) == (0, 1)
    assert head.events[-1].detail == "waited 2 steps: not enough free blocks (3 needed, 1 free)"
    assert behind.events[-1].detail == "waited 2 steps: behind the head of the queue"
    assert behind.events[-1].queue_position == 2
    assert behind.steps_waited_by_cause == {WaitReason.BEHIND_HEAD: 2}


def test_cached_tokens_of_the_first_admission_are_told(make_core: MakeCore) -> None:
    core = make_core()
    driver = Driver(core)
    tokens = np.arange(40, dtype=np.int32)
    driver.add(*(new_request(key, prompt_token_ids=tokens) for key in range(2)))
    driver.step()
    explanation = core.explain("r1")
    assert explanation is not None
    assert explanation.num_cached_tokens == 32


def test_nobody_knows_an_unknown_request(make_core: MakeCore) -> None:
    assert make_core().explain("r9") is None


def test_the_middle_of_a_long_timeline_is_left_out() -> None:
    history = History("r0", 0, 0.0, 0)
    reasons = (WaitReason.BUDGET, WaitReason.BLOCKS)
    for step in range(1, 201):
        history.passed_over(PassedOver(0, "r0", reasons[step % 2]), step, float(step))
    explanation = history.explain(201, 201.0, RequestStatus.WAITING, 0, 0)
    # The last one is the wait that is going on.
    assert len(explanation.events) == MAX_FIRST_EVENTS + MAX_LAST_EVENTS + 1
    assert explanation.num_events_left_out == 201 - MAX_FIRST_EVENTS - MAX_LAST_EVENTS
    assert sum(explanation.steps_waited_by_cause.values()) == 201


def test_ended_histories_are_kept_for_a_while() -> None:
    ledger = Ledger(max_kept=2)
    for number in range(3):
        history = History(f"r{number}", 0, 0.0, 0)
        history.finished(1, 1.0, 0, RequestStatus.ABORTED)
        ledger.keep(history)
    assert ledger.ended("r0") is None
    explanation = ledger.ended("r2")
    assert explanation is not None
    assert explanation.status is RequestStatus.ABORTED
