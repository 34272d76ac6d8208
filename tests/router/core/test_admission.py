"""Who is let in: what can be served, in time, with room to wait."""

from router.core.admission import Admit, Ask, Capacity, Limits, QueueLoad, Reason, decide

LIMITS = Limits(max_queued_requests=10, max_queued_tokens=1000)
EMPTY = QueueLoad(0, 0)
ONE_WORKER = (Capacity(100, 1000),)


def ask(num_prompt_tokens=10, **changes):
    return Ask(num_prompt_tokens=num_prompt_tokens, **changes)


def admit(a, *, capacities=ONE_WORKER, load=EMPTY, now=5.0):
    return decide(a, capacities, load, LIMITS, now)


def reason(*args, **kwargs):
    return admit(*args, **kwargs).reason


def test_max_tokens_that_are_not_given_are_all_that_is_left():
    assert admit(ask(10)) == Admit(max_tokens=90)
    assert admit(ask(99)) == Admit(max_tokens=1)


def test_max_tokens_that_are_given_are_kept():
    assert admit(ask(10, max_tokens=90)) == Admit(max_tokens=90)


def test_the_smaller_of_model_length_and_pool_counts():
    small_pool = Capacity(max_model_len=1000, num_kv_tokens=64)
    refusal = admit(ask(64), capacities=[small_pool])
    assert refusal.reason is Reason.PROMPT_TOO_LONG
    assert "KV pool holds 64" in refusal.message
    assert admit(ask(63), capacities=[small_pool]) == Admit(max_tokens=1)


def test_the_roomiest_worker_decides():
    assert admit(ask(500), capacities=[Capacity(100, 900), Capacity(600, 900)]) == Admit(100)


def test_a_prompt_that_can_never_fit_is_told_by_how_much():
    refusal = admit(ask(100))
    assert refusal.reason is Reason.PROMPT_TOO_LONG
    assert "100 tokens" in refusal.message
    assert refusal.retry_after_s is None


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


def test_what_can_never_be_served_is_said_before_what_may_pass():
    assert reason(ask(100, deadline=1.0), load=QueueLoad(10, 0)) is Reason.PROMPT_TOO_LONG
