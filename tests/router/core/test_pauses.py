import pytest

from router.core.pauses import Pauses, PauseVerdict, UnreadLimits


@pytest.mark.parametrize(
    ("num_unread", "is_paused", "verdict"),
    [
        (100, False, PauseVerdict.GO_ON),
        (101, False, PauseVerdict.PAUSE),
        (101, True, PauseVerdict.GO_ON),
        (2 * 100 + 1024, True, PauseVerdict.GO_ON),
        (2 * 100 + 1025, True, PauseVerdict.GIVE_UP),
    ],
)
def test_too_much_unread_is_paused_and_given_up_if_that_does_not_help(
    num_unread, is_paused, verdict
):
    assert UnreadLimits().verdict(num_unread, 100, is_paused=is_paused) is verdict


def test_a_slow_client_that_is_to_be_cut_is_never_paused():
    limits = UnreadLimits(slow_client="cut")
    assert limits.verdict(100, 100, is_paused=False) is PauseVerdict.GO_ON
    assert limits.verdict(101, 100, is_paused=False) is PauseVerdict.GIVE_UP


def test_it_goes_on_when_half_is_read():
    assert not UnreadLimits.may_go_on(51, 100)
    assert UnreadLimits.may_go_on(50, 100)
    assert UnreadLimits.may_go_on(0, 1)


def test_with_log_probabilities_less_may_wait():
    limits = UnreadLimits(max_unread_tokens=800)
    assert [limits.of(num) for num in (None, 0, 20)] == [800, 50, 13]
    assert UnreadLimits(max_unread_tokens=5).of(20) == 1


def test_among_many_streams_less_may_wait_for_each():
    limits = UnreadLimits(max_unread_tokens=100, max_unread_tokens_in_all=1000)
    assert [limits.crowd(n) for n in (0, 1, 10, 11, 20, 1000)] == [1, 1, 1, 2, 2, 100]
    assert limits.verdict(50, 100, is_paused=False, crowd=2) is PauseVerdict.GO_ON
    assert limits.verdict(51, 100, is_paused=False, crowd=2) is PauseVerdict.PAUSE
    assert (limits.may_go_on(25, 100, 2), limits.may_go_on(26, 100, 2)) == (True, False)


def test_nobody_is_given_up_for_others_having_come():
    limits = UnreadLimits(max_unread_tokens=10_000, max_unread_tokens_in_all=10_000)
    crowd = limits.crowd(1000)
    assert limits.verdict(9_000, 10_000, is_paused=True, crowd=crowd) is PauseVerdict.GO_ON
    assert limits.verdict(21_025, 10_000, is_paused=True, crowd=crowd) is PauseVerdict.GIVE_UP


def test_pauses_are_due_in_the_order_in_which_they_began():
    pauses = Pauses(max_pause_s=10.0)
    assert pauses.next() is None
    for now, key in enumerate((7, 3, 5)):
        pauses.begin(key, f"item {key}", float(now))
    assert pauses.next() == 10.0
    assert pauses.due(9.9) == []
    assert pauses.due(11.0) == ["item 7", "item 3"]
    assert len(pauses) == 3
    assert pauses.end(7, 11.5) == 11.5
    assert pauses.next() == 11.0


def test_a_pause_that_ended_begins_anew():
    pauses = Pauses(max_pause_s=10.0)
    pauses.begin(1, "a", 0.0)
    pauses.begin(2, "b", 1.0)
    assert pauses.end(1, 4.0) == 4.0
    pauses.begin(1, "a", 5.0)
    assert pauses.next() == 11.0
    assert pauses.end(2, 6.0) == 5.0
    assert pauses.next() == 15.0
    assert pauses.end(9, 6.0) == 0.0
