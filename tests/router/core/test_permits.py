"""Permits and rates: never one more than the cap, and rates that hold over time."""

from hypothesis import given
from hypothesis import strategies as st

from router.core import permits as permits_module
from router.core.admission import Limits, Reason, TenantLimits
from router.core.permits import Bucket, Permits

FREE = TenantLimits()


def permits(max_live=0, named=None, **tenant):
    return Permits(Limits(max_live_requests=max_live), TenantLimits(**tenant), named)


def test_there_is_never_one_more_than_the_cap():
    held = permits(max_live=2)
    assert held.enter("a", 0.0) is None
    assert held.enter("b", 0.0) is None
    assert held.enter("c", 0.0).reason is Reason.TOO_MANY_LIVE
    held.leave("a", 0.0)
    assert held.enter("c", 0.0) is None


def test_a_tenant_has_a_cap_of_its_own_and_a_named_one_another():
    held = permits(max_live_requests=1, named={"big": TenantLimits(max_live_requests=2)})
    assert [held.enter(t, 0.0) is None for t in ("a", "a", "big", "big", "big")] == [
        True, False, True, True, False,
    ]  # fmt: skip
    assert held.enter("a", 0.0).reason is Reason.TENANT_TOO_MANY_LIVE


def test_requests_beyond_the_rate_are_told_when_to_come_back():
    held = permits(requests_per_minute=60)
    for _ in range(60):
        assert held.enter("a", 0.0) is None
    refusal = held.enter("a", 0.0)
    assert (refusal.reason, refusal.retry_after_s) == (Reason.TENANT_RATE, 1.0)
    assert held.enter("b", 0.0) is None
    assert held.enter("a", 0.9) is not None
    assert held.enter("a", 1.0) is None


def test_tokens_beyond_the_rate_are_a_debt_that_is_paid_first():
    held = permits(tokens_per_minute=600)
    assert held.enter("a", 0.0) is None
    held.spend_tokens("a", 1200, 0.0)
    refusal = held.enter("a", 0.0)
    assert refusal.reason is Reason.TENANT_RATE
    assert 60.0 < refusal.retry_after_s < 60.2
    assert held.enter("a", refusal.retry_after_s) is None


def test_refused_requests_cost_nothing():
    held = permits(max_live_requests=1, requests_per_minute=2)
    assert held.enter("a", 0.0) is None
    for _ in range(10):
        assert held.enter("a", 0.0) is not None
    held.leave("a", 0.0)
    assert held.enter("a", 0.0) is None


def test_tenants_that_are_as_new_are_forgotten():
    held = permits(requests_per_minute=60)
    for number in range(40_000):
        held.enter(f"t-{number}", number * 1.0)
        held.leave(f"t-{number}", number * 1.0 + 0.5)
    assert len(held._tenants) < 20_000
    held = permits()
    held.enter("a", 0.0)
    held.leave("a", 0.0)
    assert not held._tenants


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=80))
def test_counts_equal_those_who_are_there(moves):
    held, inside = permits(max_live=4, max_live_requests=2), []
    for tenant, enters in moves:
        if enters:
            is_allowed = len(inside) < 4 and inside.count(tenant) < 2
            assert (held.enter(tenant, 0.0) is None) == is_allowed
            if is_allowed:
                inside.append(tenant)
        elif tenant in inside:
            inside.remove(tenant)
            held.leave(tenant, 0.0)
        assert held.num_live == len(inside)


@given(gaps=st.lists(st.floats(0, 3), min_size=20, max_size=200), per_minute=st.integers(1, 600))
def test_over_any_time_no_more_than_the_rate_and_one_bucket_enter(gaps, per_minute):
    held, now, entered = permits(requests_per_minute=per_minute), 0.0, 0
    for gap in gaps:
        now += gap
        entered += held.enter("a", now) is None
        assert entered <= per_minute + now * per_minute / 60 + 1e-6


def test_a_hundred_thousand_tenants_cost_each_request_the_same_and_are_forgotten(monkeypatch):
    num_looks = 0
    is_full = Bucket.is_full

    def counted(bucket, now):
        nonlocal num_looks
        num_looks += 1
        return is_full(bucket, now)

    monkeypatch.setattr(Bucket, "is_full", counted)
    held = permits(requests_per_minute=1)  # no tenant is as new for a minute
    for number in range(100_000):
        assert held.enter(f"t-{number}", number * 1e-4) is None
        held.leave(f"t-{number}", number * 1e-4)
    assert len(held._tenants) == 100_000
    assert num_looks < 4 * 100_000
    for number in range(100_000):
        assert held.enter(f"u-{number}", 1000 + number * 1e-2) is None
        held.leave(f"u-{number}", 1000 + number * 1e-2)
    assert len(held._tenants) <= 2 * permits_module._MAX_IDLE_TENANTS
    assert num_looks < 8 * 100_000
