"""The request that kills schedulers is found; those beside it go on."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.suspects import MAX_LOSSES, TRIAL_TOKENS, Suspects


def lost_twice(keys):
    suspects = Suspects()
    for _ in range(2):
        assert suspects.blame(keys) is None
    for key in keys:
        assert suspects.must_wait(key)
        suspects.hold(key, key)
    return suspects


def passes(suspects, key):
    suspects.progressed(key, TRIAL_TOKENS)


def test_after_one_loss_a_request_goes_on_like_any_other():
    suspects = Suspects()
    suspects.blame([1, 2])
    assert not suspects.must_wait(1)


def test_after_two_losses_one_is_tried_while_the_others_wait():
    suspects = lost_twice([1, 2, 3])
    assert suspects.release() == [1]
    assert not suspects.must_wait(1)
    assert suspects.release() == []
    assert suspects.num_held == 2


def test_groups_double_as_they_pass():
    suspects = lost_twice(range(8))
    sizes = []
    while group := suspects.release():
        sizes.append(len(group))
        for key in group:
            passes(suspects, key)
    assert sizes == [1, 2, 4, 1]


def test_a_request_passes_with_its_tokens_and_is_then_as_good_as_new():
    suspects = lost_twice([1, 2])
    suspects.release()
    suspects.progressed(1, TRIAL_TOKENS - 1)
    assert suspects.has_trial
    suspects.progressed(1, 1)
    assert not suspects.has_trial
    assert suspects.blame([1]) is None
    assert not suspects.must_wait(1)


def test_a_loss_during_a_trial_is_the_trials_alone():
    suspects = lost_twice([1, 2])
    [tried] = suspects.release()
    assert suspects.blame([tried, 7, 8]) == tried
    assert not suspects.must_wait(7)


def test_a_loss_elsewhere_does_not_end_a_trial():
    suspects = lost_twice([1])
    suspects.release()
    suspects.blame([7, 8])
    assert suspects.has_trial
    assert not suspects.must_wait(1)


def test_a_request_that_ends_while_it_is_held_is_forgotten():
    suspects = lost_twice([1, 2])
    suspects.clear(1)
    assert suspects.release() == [2]
    suspects.clear(2)
    assert not suspects.has_trial
    assert suspects._num_losses == {}


@given(num_requests=st.integers(1, 200), killer=st.integers(0, 199), num_tokens=st.integers(0, 15))
def test_the_killer_alone_is_found_and_with_few_losses(num_requests, killer, num_tokens):
    killer %= num_requests
    suspects, num_losses, ended = lost_twice(range(num_requests)), 2, set()
    while group := suspects.release():
        for key in group:
            if key != killer:
                passes(suspects, key)
                ended.add(key)
        if killer in group:
            suspects.progressed(killer, num_tokens)
            num_losses += 1
            if suspects.blame([killer, *ended]) == killer:
                suspects.clear(killer)
                break
            suspects.hold(killer, killer)
    while group := suspects.release():
        for key in group:
            passes(suspects, key)
    assert suspects.num_held == 0
    assert num_losses <= MAX_LOSSES + 1
