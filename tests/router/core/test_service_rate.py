"""The measured pace of the queue."""

import pytest

from router.core.service_rate import ServiceRate


def steady(rate, *, seconds, tokens_per_s, begin=0.0):
    for tick in range(int(seconds * 10)):
        now = begin + (tick + 1) / 10
        rate.observe(now, num_tokens=tokens_per_s / 10, is_waiting=True)
    return begin + seconds


def test_a_steady_pace_is_measured():
    rate = ServiceRate()
    rate.observe(0.0, is_waiting=False)
    steady(rate, seconds=5, tokens_per_s=200)
    assert rate.tokens_per_s == pytest.approx(200, rel=0.02)
    assert rate.predicted_wait_s(600) == pytest.approx(3.0, rel=0.02)


def test_nothing_is_claimed_before_anything_is_known():
    rate = ServiceRate()
    assert (rate.tokens_per_s, rate.predicted_wait_s(10**6)) == (None, 0.0)
    rate.observe(0.0, is_waiting=True)
    rate.observe(100.0, is_waiting=True)
    assert (rate.tokens_per_s, rate.predicted_wait_s(10**6)) == (None, 0.0)


def test_idle_time_does_not_count():
    rate = ServiceRate()
    rate.observe(0.0, is_waiting=False)
    end = steady(rate, seconds=5, tokens_per_s=200)
    rate.observe(end + 10_000, is_waiting=False)
    steady(rate, seconds=1, tokens_per_s=200, begin=end + 10_000)
    assert rate.tokens_per_s == pytest.approx(200, rel=0.02)


def test_old_measurements_fade():
    rate = ServiceRate(half_life_s=2.0)
    rate.observe(0.0, is_waiting=False)
    end = steady(rate, seconds=10, tokens_per_s=1000)
    steady(rate, seconds=20, tokens_per_s=10, begin=end)
    assert rate.tokens_per_s == pytest.approx(10, rel=0.2)
