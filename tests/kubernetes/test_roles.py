"""Which worker of a pool changes between prefill and decode, as tables."""

import pytest

from headrace.kubernetes.roles import divide
from headrace.kubernetes.sizing import Measured, Targets, Trend, decide

TARGETS = Targets(
    min_replicas=1, max_replicas=8, kv_use=0, queued_per_worker=2, queue_wait_s=5, ttft_s=1,
    tpot_s=0.1, up_after_s=10, dwell_s=50, by_role=True,
)  # fmt: skip
BOTH = {"num_ready": 4, "kv_use": 0.5, "prefill": ("a", "b"), "decode": ("c", "d")}
ON_TARGET = {"ttft_s": 1.0, "tpot_s": 0.1}


def settled(measured, targets=TARGETS):
    """The move when things have been so for long."""
    _, trend = divide(measured, targets, Trend(), 0)
    return divide(measured, targets, trend, 1000)[0]


@pytest.mark.parametrize(
    ("measured", "wanted"),
    [
        (ON_TARGET, None),
        # One side is short, and the other can do with one less.
        ({"ttft_s": 1.5, "tpot_s": 0.04}, ("c", "prefill")),
        ({"ttft_s": 0.4, "tpot_s": 0.15}, ("a", "decode")),
        ({"queue_wait_s": 6.0, "ttft_s": 1.0, "tpot_s": 0.04}, ("c", "prefill")),
        ({"num_queued": 12, "ttft_s": 1.0, "tpot_s": 0.04}, ("c", "prefill")),
        # Nearly on target is on target.
        ({"ttft_s": 1.05, "tpot_s": 0.01}, None),
        # The other side would be short then: with half its workers it is at twice its load.
        ({"ttft_s": 1.5, "tpot_s": 0.05}, None),
        # Both are short: the pool must grow.
        ({"ttft_s": 1.5, "tpot_s": 0.15}, None),
        # Each side keeps a worker.
        ({"ttft_s": 1.5, "tpot_s": 0.01, "decode": ("c",)}, None),
        # Mixed workers, or workers of one role alone, are not divided.
        ({"ttft_s": 1.5, "tpot_s": 0.01, "prefill": (), "decode": ()}, None),
        ({"ttft_s": 0.1, "tpot_s": 0.15, "prefill": ()}, None),
        # Without traffic nothing is known of decode workers.
        ({"ttft_s": 1.5, "tpot_s": None}, None),
    ],
)
def test_a_worker_leaves_the_side_that_can_spare_it(measured, wanted):
    move = settled(Measured(**(BOTH | measured)))
    assert (move and (move.worker_id, move.role)) == wanted


def test_the_reason_names_both_sides():
    move = settled(Measured(**BOTH, ttft_s=1.5, tpot_s=0.04))
    assert move.reason == (
        "TTFT is at 150% of its target, and TPOT would be at 80% with one worker less"
    )


def moves(values, *, every_s=5):
    """Whether a worker moves while TTFT takes these values, one in each every_s."""
    trend, found = Trend(), []
    for i, ttft_s in enumerate(values):
        move, trend = divide(
            Measured(**BOTH, ttft_s=ttft_s, tpot_s=0.04), TARGETS, trend, i * every_s
        )
        found.append(move is not None)
    return found


def test_a_move_waits_until_the_load_has_lasted_and_for_the_dwell():
    assert not any(moves([1.0, 1.5, 1.5, 1.0] * 20))
    # 10 s of load, then a move; the next one 50 s later.
    assert [i for i, moved in enumerate(moves([1.5] * 15)) if moved] == [2, 12]


@pytest.mark.parametrize(
    ("roles", "by_role", "why"),
    [
        ({"decode": ("a", "b")}, True, "TPOT is at 60%"),
        ({"decode": ("a", "b")}, False, "TTFT is at 150%"),
        ({"prefill": ("a", "b")}, True, "TTFT is at 150%"),
        ({"prefill": ("a",), "decode": ("b",)}, True, "TTFT is at 150%"),
        ({}, True, "TTFT is at 150%"),
    ],
)
def test_a_pool_of_one_role_is_sized_by_what_the_role_does(roles, by_role, why):
    measured = Measured(num_ready=2, kv_use=0, ttft_s=1.5, tpot_s=0.06, **roles)
    targets = Targets(
        min_replicas=1, max_replicas=8, ttft_s=1, tpot_s=0.1, up_after_s=0, by_role=by_role
    )
    assert why in decide(2, measured, targets, Trend(), 0)[0].reason
