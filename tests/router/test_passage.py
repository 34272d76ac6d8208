"""How the router's part of a completion's time and the scheduler's add up."""

import math

import pytest

from router.core.admission import QueueLoad
from router.passage import Load, Passage, SchedulerAccount, Share, Stage, breakdown

ARRIVED_UNIX_S = 1000.0


def passed(*stages: tuple[Stage, float], is_taken_up: bool = False) -> Passage:
    """A completion that arrived at 10 s and entered each stage at a time."""
    passage = Passage(10.0, is_taken_up=is_taken_up)
    for stage, now in stages:
        if stage is Stage.QUEUE:
            passage.queue({}, "", now)
        else:
            passage.enter(stage, now)
    return passage


def scheduler_account(
    *shares: Share, began: float = 2.0, is_first: bool = True, is_continued: bool = False
) -> SchedulerAccount:
    return SchedulerAccount(
        shares, ARRIVED_UNIX_S + began, is_first=is_first, is_continued=is_continued
    )


def seconds(
    passage: Passage, scheduler: SchedulerAccount | None, now: float = 99.0
) -> dict[str, float]:
    account = passage.account(ARRIVED_UNIX_S, now)
    shares = breakdown(account, scheduler)
    assert math.isclose(sum(share.seconds for share in shares), account.total_s)
    assert all(share.seconds > 0 for share in shares)
    return {share.stage: round(share.seconds, 6) for share in shares}


SERVED = ((Stage.QUEUE, 11.0), (Stage.DISPATCHED, 14.0), (Stage.ENDED, 20.0))


def test_the_rest_is_the_network() -> None:
    account = scheduler_account(Share("PREFILL", 2.0), Share("DECODE", 3.0))
    assert seconds(passed(*SERVED), account) == {
        "TOKENIZE": 1.0, "QUEUE": 3.0, "PREFILL": 2.0, "DECODE": 3.0, "OTHER": 1.0,
    }  # fmt: skip


def test_a_scheduler_that_counts_more_than_there_is_loses_what_is_too_much() -> None:
    account = scheduler_account(Share("PREFILL", 2.0), Share("DECODE", 5.0))
    assert seconds(passed(*SERVED), account) == {
        "TOKENIZE": 1.0, "QUEUE": 3.0, "PREFILL": 2.0, "DECODE": 4.0,
    }  # fmt: skip


def test_a_request_that_waits_in_the_queue_has_waited_until_now() -> None:
    assert seconds(passed((Stage.QUEUE, 11.0)), None, now=15.0) == {"TOKENIZE": 1.0, "QUEUE": 4.0}


@pytest.mark.parametrize(
    ("admitted", "first_token", "before"),
    [
        (None, None, {"WAIT": 3.0}),
        (15.0, None, {"WAIT": 1.0, "PREFILL": 2.0}),
        (15.0, 16.0, {"WAIT": 1.0, "PREFILL": 1.0, "DECODE": 1.0}),
    ],
)
def test_a_lost_scheduler_leaves_what_the_router_heard_of_it(admitted, first_token, before) -> None:
    passage = passed(*SERVED[:2])
    passage.lose(admitted, first_token, 17.0)
    passage.enter(Stage.QUEUE, 17.0)
    passage.enter(Stage.DISPATCHED, 18.0)
    passage.enter(Stage.ENDED, 21.0)
    account = scheduler_account(Share("RECOVERED", 2.0), is_first=False)
    expected = {"TOKENIZE": 1.0, "QUEUE": 3.0, **before, "RECOVERED": 3.0, "OTHER": 1.0}
    assert seconds(passage, account) == expected


def test_a_scheduler_that_kept_the_request_tells_what_a_lost_connection_hid() -> None:
    passage = passed(*SERVED[:2])
    passage.lose(None, None, 17.0)
    passage.enter(Stage.DISPATCHED, 18.0)
    passage.enter(Stage.ENDED, 20.0)
    account = scheduler_account(Share("DECODE", 5.5), began=4.0, is_continued=True)
    assert seconds(passage, account) == {
        "TOKENIZE": 1.0, "QUEUE": 3.0, "DECODE": 5.5, "OTHER": 0.5,
    }  # fmt: skip


def test_a_request_of_a_lost_router_was_queued_before_its_scheduler_got_it() -> None:
    passage = passed((Stage.DISPATCHED, 18.0), (Stage.ENDED, 20.0), is_taken_up=True)
    account = scheduler_account(Share("DECODE", 7.0), began=2.5, is_continued=True)
    assert seconds(passage, account) == {"QUEUE": 2.5, "DECODE": 7.0, "OTHER": 0.5}
    # The clock of the scheduler's machine is far ahead.
    account = scheduler_account(Share("DECODE", 7.0), began=500.0, is_continued=True)
    assert seconds(passage, account) == {"QUEUE": 3.0, "DECODE": 7.0}


def test_of_a_life_that_nobody_remembers_the_time_is_kept() -> None:
    stages = ((Stage.QUEUE, 16.0), (Stage.DISPATCHED, 17.0), (Stage.ENDED, 20.0))
    account = scheduler_account(Share("RECOVERED", 1.0), Share("DECODE", 2.0), is_first=False)
    assert seconds(passed(*stages, is_taken_up=True), account) == {
        "DECODE": 2.0, "RECOVERED": 2.0, "OTHER": 6.0,
    }  # fmt: skip


def test_the_queue_is_told_by_tenant_as_it_was_first() -> None:
    passage = Passage(10.0, is_taken_up=False)
    waiting = {f"t{number}": QueueLoad(1, number) for number in range(12)}
    passage.queue(waiting, "t3", 11.0)
    passage.queue({}, "t3", 12.0)
    loads = passage.account(ARRIVED_UNIX_S, 13.0).queued_with
    assert [load.tenant for load in loads[:3]] == ["t3", "t11", "t10"]
    assert loads[-1] == Load("*", 4, 0 + 1 + 2 + 4)
    assert sum(load.num_requests for load in loads) == 12
