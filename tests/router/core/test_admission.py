"""Who is let in: what can be served, in time, with room to wait."""

import pytest

from router.core.admission import (
    Admit,
    Ask,
    Capacity,
    Limits,
    QueueLoad,
    Reason,
    Situation,
    TenantLimits,
    decide,
)

LIMITS = Limits(max_queued_requests=10, max_queued_tokens=1000)
EMPTY = QueueLoad(0, 0)
ONE_WORKER = (Capacity(100, 100, 10),)


def ask(num_prompt_tokens=10, **changes):
    return Ask(num_prompt_tokens=num_prompt_tokens, **changes)


def admit(a, *, capacities=ONE_WORKER, load=EMPTY, tenant_load=EMPTY, now=5.0, **facts):
    limits = TenantLimits(max_queued_requests=5, max_queued_tokens=500)
    situation = Situation(capacities=capacities, load=load, tenant_load=tenant_load, **facts)
    return decide(a, situation, LIMITS, limits, now)


def reason(*args, **kwargs):
    return admit(*args, **kwargs).reason


def test_max_tokens_that_are_not_given_are_all_that_is_left():
    assert admit(ask(10)) == Admit(max_tokens=90)
    assert admit(ask(99)) == Admit(max_tokens=1)


def test_max_tokens_that_are_given_are_kept():
    assert admit(ask(10, max_tokens=90)) == Admit(max_tokens=90)


def test_min_tokens_that_can_never_come_are_refused():
    assert admit(ask(10, min_tokens=90)) == Admit(max_tokens=90)
    refusal = admit(ask(10, min_tokens=91))
    assert refusal.reason is Reason.MIN_TOKENS_TOO_LARGE
    assert "at most 90 tokens are left" in refusal.message


def test_the_smaller_of_model_length_and_pool_counts():
    """The last token needs no KV: a pool of 64 slots carries 65 tokens."""
    small_pool = Capacity(max_model_len=1000, num_kv_blocks=4, block_size=16)
    refusal = admit(ask(65), capacities=[small_pool])
    assert refusal.reason is Reason.PROMPT_TOO_LONG
    assert "KV pool carries 65" in refusal.message
    assert admit(ask(64), capacities=[small_pool]) == Admit(max_tokens=1)


def test_the_roomiest_worker_decides():
    assert admit(ask(500), capacities=[Capacity(100, 90, 10), Capacity(600, 90, 10)]) == Admit(100)


def test_a_prompt_that_can_never_fit_is_told_by_how_much():
    refusal = admit(ask(100))
    assert refusal.reason is Reason.PROMPT_TOO_LONG
    assert "100 tokens" in refusal.message
    assert refusal.retry_after_s is None


def test_of_a_prompt_that_is_not_read_yet_it_is_told_what_it_has_at_least():
    assert "at least 100 tokens" in admit(ask(100, is_read=False)).message
    assert "at least 90 tokens" in admit(ask(90, max_tokens=11, is_read=False)).message


def test_too_many_output_tokens_are_told_how_many_are_left():
    refusal = admit(ask(90, max_tokens=11))
    assert refusal.reason is Reason.MAX_TOKENS_TOO_LARGE
    assert "at most 10" in refusal.message


def test_without_workers_it_says_when_to_try_again():
    refusal = admit(ask(), capacities=[])
    assert refusal.reason is Reason.NO_READY_WORKER
    assert refusal.retry_after_s is not None


def test_a_deadline_must_lie_ahead():
    assert reason(ask(deadline=5.0)) is Reason.DEADLINE_PASSED
    assert isinstance(admit(ask(deadline=5.1)), Admit)


def test_the_queue_is_capped_by_requests_and_by_tokens():
    assert isinstance(admit(ask(), load=QueueLoad(9, 0)), Admit)
    assert reason(ask(), load=QueueLoad(10, 0)) is Reason.QUEUE_FULL
    assert isinstance(admit(ask(), load=QueueLoad(0, 990)), Admit)
    assert reason(ask(), load=QueueLoad(0, 991)) is Reason.QUEUE_FULL


def test_several_completions_count_one_by_one():
    assert reason(ask(num_completions=4), load=QueueLoad(7, 0)) is Reason.QUEUE_FULL
    assert reason(ask(num_completions=4), load=QueueLoad(0, 961)) is Reason.QUEUE_FULL
    assert isinstance(admit(ask(num_completions=4), load=QueueLoad(6, 960)), Admit)


def test_more_completions_than_may_ever_wait_are_not_told_to_try_again():
    refusal = admit(ask(1, num_completions=6))
    assert refusal.reason is Reason.TOO_MANY_COMPLETIONS
    assert refusal.retry_after_s is None


def test_what_can_never_be_served_is_said_before_what_may_pass():
    assert reason(ask(100, deadline=1.0), load=QueueLoad(10, 0)) is Reason.PROMPT_TOO_LONG


def test_a_tenant_has_a_cap_of_its_own():
    assert isinstance(admit(ask(), tenant_load=QueueLoad(4, 490)), Admit)
    assert reason(ask(), tenant_load=QueueLoad(5, 0)) is Reason.TENANT_QUEUE_FULL
    assert reason(ask(), tenant_load=QueueLoad(0, 491)) is Reason.TENANT_QUEUE_FULL


def test_a_deadline_before_the_predicted_wait_is_over_is_out_of_reach():
    refusal = admit(ask(deadline=8.0), predicted_wait_s=3.1)
    assert refusal.reason is Reason.DEADLINE_OUT_OF_REACH
    assert "3.0 s away" in refusal.message
    assert isinstance(admit(ask(deadline=8.0), predicted_wait_s=2.9), Admit)
    assert isinstance(admit(ask(), predicted_wait_s=1e9), Admit)


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_s", "expected"),
    [(800, None, 1.0), (800, 100.0, 4.0), (800, 1e6, 0.1), (800, 0.1, 60.0)],
)
def test_a_full_queue_says_when_half_of_it_will_be_gone(num_tokens, tokens_per_s, expected):
    refusal = admit(ask(), load=QueueLoad(10, num_tokens), tokens_per_s=tokens_per_s)
    assert refusal.retry_after_s == expected


def test_limits_of_zero_are_none():
    situation = Situation(
        capacities=ONE_WORKER, load=QueueLoad(10**6, 10**9), tenant_load=QueueLoad(10**6, 10**9)
    )
    assert isinstance(decide(ask(), situation, Limits(), TenantLimits(), 5.0), Admit)
