"""How many workers a pool should have, as tables."""

import pytest

from headrace.kubernetes.sizing import Measured, Targets, Trend, decide

TARGETS = Targets(
    min_replicas=1,
    max_replicas=8,
    ttft_s=1.0,
    tpot_s=0.05,
    up_after_s=10,
    down_after_s=100,
    dwell_s=50,
)
CALM = {"num_ready": 4, "kv_use": 0.75}


def settled(replicas, measured, targets=TARGETS):
    """The decision when things have been so for long."""
    _, trend = decide(replicas, measured, targets, Trend(), 0)
    return decide(replicas, measured, targets, trend, 1000)[0]


@pytest.mark.parametrize(
    ("replicas", "measured", "wanted", "why"),
    [
        (4, CALM, 4, "KV use is at 94%"),
        (4, CALM | {"kv_use": 1.0}, 5, "KV use"),
        (4, CALM | {"num_queued": 16}, 8, "queue is at 200%"),
        (4, CALM | {"ttft_s": 1.5}, 6, "TTFT is at 150%"),
        (4, CALM | {"tpot_s": 0.06}, 5, "TPOT is at 120%"),
        (4, CALM | {"ttft_s": 1.05}, 4, "TTFT is at 105%"),
        # Never more than twice as many, nor more than the bound.
        (2, {"num_ready": 2, "kv_use": 0.1, "ttft_s": 30.0}, 4, "TTFT"),
        (8, {"num_ready": 8, "kv_use": 0.1, "ttft_s": 30.0}, 8, "that is the bound"),
        # One less, and only if one less still does.
        (4, CALM | {"kv_use": 0.2}, 3, "KV use is at 25%"),
        (4, CALM | {"kv_use": 0.58}, 4, "KV use"),
        (1, {"num_ready": 1, "kv_use": 0.0}, 1, "KV use"),
        # More workers come, and count when they have.
        (4, {"num_ready": 2, "kv_use": 1.0}, 4, "2 workers are not ready"),
        (12, CALM, 8, "outside of the bounds"),
        (0, {"num_ready": 0, "kv_use": 0.0}, 1, "outside of the bounds"),
    ],
)
def test_the_worst_signal_decides(replicas, measured, wanted, why):
    decision = settled(replicas, Measured(**measured))
    assert decision.replicas == wanted
    assert why in decision.reason


def test_a_pool_that_may_be_empty_is_emptied_and_wakes_up():
    targets = Targets(min_replicas=0, max_replicas=2)
    assert settled(1, Measured(num_ready=1, kv_use=0.0), targets).replicas == 0
    assert settled(0, Measured(num_ready=0, kv_use=0.0, num_queued=1), targets).replicas == 1


def run(values, *, replicas=4, every_s=5):
    """The numbers of workers while KV use takes these values, one in each every_s."""
    trend, numbers = Trend(), []
    for i, kv_use in enumerate(values):
        measured = Measured(num_ready=replicas, kv_use=kv_use)
        decision, trend = decide(replicas, measured, TARGETS, trend, i * every_s)
        replicas = decision.replicas
        numbers.append(replicas)
    return numbers


def test_a_peak_that_does_not_last_changes_nothing():
    assert set(run([0.75, 1.0, 0.75] * 20)) == {4}


def test_load_that_lasts_is_answered_after_a_while_and_once_in_the_dwell():
    # 10 s of load, then a change; the next one 50 s later.
    assert run([1.0] * 13) == [4, 4, *[5] * 10, 7]


def test_an_overload_counts_from_when_all_workers_are_ready():
    busy, starting = Measured(num_ready=4, kv_use=1.0), Measured(num_ready=3, kv_use=1.0)
    _, trend = decide(4, starting, TARGETS, Trend(), 0)
    now, trend = decide(4, busy, TARGETS, trend, 100)
    assert now.replicas == 4
    assert decide(4, busy, TARGETS, trend, 110)[0].replicas == 5


def test_a_pool_shrinks_slowly():
    numbers = run([0.0] * 45)
    assert numbers[:20] == [4] * 20
    assert numbers[20] == 3
    assert numbers[-1] == 2
