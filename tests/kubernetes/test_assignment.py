"""Which scheduler should own which worker, as tables; and how long a lease is believed."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kubernetes.assignment import assign
from headrace.kubernetes.leases import Lease, LeaseKind, Sightings

WORKERS = [f"w{i}" for i in range(7)]


@pytest.mark.parametrize(
    ("members", "owners", "num_moved"),
    [
        ({"a"}, {}, 0),
        ({"a", "b"}, {"w0": "a"}, 0),
        ({"a", "b"}, dict.fromkeys(WORKERS, "a"), 3),
        ({"a", "b", "c"}, dict.fromkeys(WORKERS[:4], "a") | dict.fromkeys(WORKERS[4:], "b"), 2),
        ({"b", "c"}, dict.fromkeys(WORKERS[:4], "a") | dict.fromkeys(WORKERS[4:], "b"), 0),
        # Unequal by one is equal.
        ({"a", "b"}, dict.fromkeys(WORKERS[:3], "a") | dict.fromkeys(WORKERS[3:], "b"), 0),
    ],
)
def test_as_few_workers_as_possible_leave_their_owner(members, owners, num_moved):
    assigned = assign(WORKERS, members, owners)
    living = {worker: owner for worker, owner in owners.items() if owner in members}
    assert sum(assigned[worker] != owner for worker, owner in living.items()) == num_moved


def test_without_a_member_nobody_owns_anything():
    assert assign(WORKERS, set(), {"w0": "a"}) == {}


@given(
    st.sets(st.sampled_from([f"w{i}" for i in range(20)])),
    st.sets(st.sampled_from("abcde"), min_size=1),
    st.dictionaries(st.sampled_from([f"w{i}" for i in range(20)]), st.sampled_from("abcdef")),
)
def test_every_worker_has_one_owner_and_owners_have_equally_many(workers, members, owners):
    assigned = assign(workers, members, owners)
    assert assigned.keys() == workers
    counts = Counter(dict.fromkeys(members, 0)) + Counter(assigned.values())
    counts = [Counter(assigned.values())[member] for member in members]
    assert max(counts) - min(counts) <= 1
    assert assign(sorted(workers, reverse=True), members, assigned) == assigned, "it is settled"


class Seen:
    """Sightings of one lease, at moments that a test chooses."""

    def __init__(self):
        self._sightings = Sightings()

    def at(self, now_s, renewed, holder="a/1"):
        lease = Lease("a", LeaseKind.SCHEDULER, holder, 0, 10, renewed=renewed)
        return self._sightings.observe(now_s, [lease]) == {"a"}


def test_a_holder_is_dead_when_its_lease_was_seen_unchanged_for_the_duration():
    seen = Seen()
    assert all(seen.at(now_s, "x") for now_s in range(100, 110, 2))
    assert not seen.at(110, "x")


def test_clocks_of_others_do_not_count():
    seen = Seen()
    # Renewed long ago, or in the future, by whatever clock: what counts is the change.
    assert all(seen.at(now_s, f"year {9999 - now_s}") for now_s in range(0, 60, 2))


def test_a_lease_without_a_holder_is_free_at_once():
    seen = Seen()
    assert seen.at(0, "x")
    assert not seen.at(1, "y", holder="")


def test_time_in_which_nothing_could_be_seen_does_not_count():
    seen = Seen()
    assert seen.at(0, "x")
    assert seen.at(60, "x"), "the API server was away, or we were stopped"
    assert all(seen.at(now_s, "x") for now_s in range(62, 70, 2))
    assert not seen.at(70, "x")
