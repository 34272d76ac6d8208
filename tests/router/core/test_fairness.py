"""Fair sharing: turns by tokens served, within the bound that the module states."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.fairness import FairShare


def waiting(*tenants, **options):
    shares = FairShare(**options)
    for tenant in tenants:
        shares.begin_waiting(tenant)
    return shares


def turns(shares, num_turns, cost_by_tenant):
    order = []
    for _ in range(num_turns):
        tenant = shares.next()
        shares.account(tenant).charge_prompt(cost_by_tenant[tenant])
        order.append(tenant)
    return order


def test_a_tenant_of_huge_prompts_does_not_crowd_out_one_of_tiny_prompts():
    order = turns(waiting("huge", "tiny"), 2002, {"huge": 30_000, "tiny": 30})
    assert order.count("huge") == 2
    assert order.count("tiny") == 2000


def test_weights_divide_the_service():
    shares = waiting("one", "three", weight_by_tenant={"three": 3.0})
    order = turns(shares, 400, {"one": 10, "three": 10})
    assert order.count("three") == 300


def test_output_is_priced_apart_and_counts():
    shares = waiting("talks", "reads", output_price=4.0)
    shares.account("talks").charge_output(100)
    assert shares.account("talks").virtual_tokens == 400
    assert turns(shares, 4, {"reads": 100}) == ["reads"] * 4


def test_idle_time_cannot_be_saved_up():
    shares = waiting("busy")
    turns(shares, 100, {"busy": 1000})
    shares.begin_waiting("back")
    order = turns(shares, 20, {"busy": 10, "back": 10})
    assert order.count("back") in {10, 11}


def test_a_pause_does_not_wipe_out_what_was_served():
    shares = waiting("greedy", "other")
    turns(shares, 1, {"greedy": 10_000, "other": 10_000})
    first = "greedy" if shares.next() == "other" else "other"
    shares.end_waiting(first)
    shares.begin_waiting(first)
    other = {"greedy": "other", "other": "greedy"}[first]
    assert turns(shares, 10, {other: 1000}) == [other] * 10


def test_when_all_have_paused_the_next_to_come_begin_level():
    shares = waiting("a", "b")
    turns(shares, 50, {"a": 7, "b": 900})
    shares.end_waiting("a")
    shares.end_waiting("b")
    for tenant in ("a", "b", "new"):
        shares.begin_waiting(tenant)
    counters = [shares.account(t).virtual_tokens for t in ("a", "b", "new")]
    assert max(counters) - min(counters) <= 900


def test_accounts_of_idle_tenants_do_not_pile_up():
    shares = FairShare()
    for number in range(50_000):
        shares.begin_waiting(f"t-{number}")
        shares.account(f"t-{number}").charge_prompt(5)
        shares.end_waiting(f"t-{number}")
    assert len(shares._account_by_tenant) <= 20_001
    assert len(shares._waiting._heap) <= 20_001


TENANTS = ("a", "b", "c")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.5}
PRICE = 2.0


@given(
    prompts=st.lists(st.integers(1, 5000), min_size=30, max_size=200),
    outputs=st.lists(st.integers(0, 300), min_size=30, max_size=200),
    slots=st.integers(1, 8),
)
def test_counters_stay_within_the_bound_while_all_wait(prompts, outputs, slots):
    """Requests hold a slot while they produce; each turn goes to whoever is next."""
    shares = waiting(*TENANTS, weight_by_tenant=WEIGHTS, output_price=PRICE)
    in_flight = []
    ahead = dict.fromkeys(TENANTS, 0.0)  # what a tenant may still be charged since its last turn
    for prompt, output in zip(prompts, outputs, strict=False):
        if len(in_flight) == slots:
            tenant, num_tokens = in_flight.pop(0)
            shares.account(tenant).charge_output(num_tokens)
            check_bound(shares, ahead)
        tenant = shares.next()
        in_flight.append((tenant, output))
        unproduced = sum(num for who, num in in_flight if who == tenant)
        ahead[tenant] = (prompt + PRICE * unproduced) / WEIGHTS[tenant]
        shares.account(tenant).charge_prompt(prompt)
        check_bound(shares, ahead)


def check_bound(shares, ahead):
    counters = {tenant: shares.account(tenant).virtual_tokens for tenant in TENANTS}
    for one in TENANTS:
        for other in TENANTS:
            assert counters[one] - counters[other] <= ahead[one] + 1e-6
