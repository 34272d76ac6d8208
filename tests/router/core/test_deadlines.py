"""Deadlines come due in order, and forgotten ones never."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.deadlines import Deadlines


def test_what_is_due_comes_out_earliest_first_and_once():
    deadlines = Deadlines()
    for key, when in ((1, 5.0), (2, 3.0), (3, 9.0)):
        deadlines.add(key, when)
    assert deadlines.next() == 3.0
    assert deadlines.pop_due(2.9) == []
    assert deadlines.pop_due(5.0) == [2, 1]
    assert (deadlines.next(), len(deadlines)) == (9.0, 1)


def test_a_forgotten_deadline_never_comes_due():
    deadlines = Deadlines()
    deadlines.add(1, 5.0)
    deadlines.discard(1)
    deadlines.discard(1)
    assert (deadlines.next(), deadlines.pop_due(100.0), len(deadlines)) == (None, [], 0)


def test_forgotten_deadlines_do_not_pile_up():
    deadlines = Deadlines()
    deadlines.add(0, 1e9)
    for key in range(1, 10_000):
        deadlines.add(key, 1e8)
        deadlines.discard(key)
    assert len(deadlines._heap) < 100
    assert deadlines.next() == 1e9


@given(
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 9), st.sampled_from(["add", "drop", "due"])))
)
def test_equals_a_plain_mapping(steps):
    deadlines, model = Deadlines(), {}
    for key, when, action in steps:
        if action == "add" and key not in model:
            model[key] = when
            deadlines.add(key, when)
        elif action == "drop":
            model.pop(key, None)
            deadlines.discard(key)
        elif action == "due":
            due = {k for k, w in model.items() if w <= when}
            assert set(deadlines.pop_due(when)) == due
            model = {k: w for k, w in model.items() if k not in due}
        assert deadlines.next() == min(model.values(), default=None)
        assert len(deadlines) == len(model)
