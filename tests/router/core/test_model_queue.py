"""The order of waiting requests, and taking them out from anywhere."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fairness import FairShare
from router.core.model_queue import ModelQueue
from router.core.policies import make_order
from router.core.policies.order import QueueEntry


def entry(key, *, model="m", arrival=0.0, num_tokens=1, priority=0, tenant=""):
    return QueueEntry(
        key=key,
        model=model,
        order=key,
        arrival=arrival,
        num_tokens=num_tokens,
        priority=priority,
        tenant=tenant,
        item=f"request {key}",
    )


def drain(queue, keys_by_item):
    order = []
    while (item := queue.peek()) is not None:
        order.append(keys_by_item[item])
        queue.remove(order[-1])
    return order


def filled(policy, *entries):
    queue = ModelQueue(make_order(policy))
    for one in entries:
        queue.push(one)
    return queue, {one.item: one.key for one in entries}


def test_fcfs_goes_by_arrival_whatever_the_priority():
    queue, keys = filled("fcfs", entry(2), entry(1, priority=9), entry(3, priority=-9))
    assert drain(queue, keys) == [1, 2, 3]


def test_priority_goes_by_the_smaller_priority_then_arrival():
    queue, keys = filled(
        "priority", entry(1, priority=5), entry(2, priority=-1), entry(3, priority=5), entry(4)
    )
    assert drain(queue, keys) == [2, 4, 1, 3]


def test_a_request_that_comes_back_is_ahead_of_later_ones():
    queue, keys = filled("fcfs", entry(1), entry(2), entry(3))
    assert queue.peek() == "request 1"
    queue.remove(1)
    queue.push(entry(1, num_tokens=5))
    assert (queue.num_tokens, len(queue)) == (7, 3)
    assert drain(queue, keys) == [1, 2, 3]


def test_peeking_takes_nothing_out():
    queue, _ = filled("fcfs", entry(1))
    assert queue.peek() == queue.peek() == "request 1"
    assert len(queue) == 1


def test_removing_what_does_not_wait_changes_nothing():
    queue, _ = filled("fcfs", entry(1, num_tokens=4))
    assert not queue.remove(7)
    assert queue.remove(1)
    assert not queue.remove(1)
    assert (len(queue), queue.num_tokens, queue.peek()) == (0, 0, None)
    assert (queue._heaps, queue._load_by_tenant) == ({}, {})


def test_places_of_removed_requests_do_not_pile_up():
    queue = ModelQueue(make_order("fcfs"))
    queue.push(entry(0))
    for key in range(1, 10_000):
        queue.push(entry(key))
        queue.remove(key)
    assert sum(len(heap._heap) for heap in queue._heaps.values()) < 100


steps = st.lists(
    st.tuples(
        st.sampled_from(["push", "remove", "pop", "pass over"]),
        st.integers(0, 9),
        st.integers(-2, 2),
    ),
    max_size=60,
)


@given(steps=steps, policy=st.sampled_from(["fcfs", "priority"]))
def test_equals_a_sorted_list_under_any_use(steps, policy):
    def rank(e):
        return (e.priority if policy == "priority" else 0, e.order)

    def by_item(model, item):
        return next(e for e in model.values() if e.item == item)

    queue, model = ModelQueue(make_order(policy)), {}
    for action, key, priority in steps:
        if action == "push" and key not in model:
            model[key] = entry(key, num_tokens=key, priority=priority)
            queue.push(model[key])
        elif action == "remove":
            assert queue.remove(key) == (model.pop(key, None) is not None)
        elif action == "pass over" and queue.peek() is not None:
            # Those behind come to the head, in order, and all are back afterwards.
            seen = [queue.peek()]
            for _ in range(key):
                queue.pass_over()
                if queue.peek() is None:
                    break
                seen.append(queue.peek())
            assert seen == sorted(seen, key=lambda item: rank(by_item(model, item)))
            assert len(set(seen)) == len(seen)
            queue.put_back()
        elif action == "pop" and model:
            expected = min(model.values(), key=rank)
            assert queue.peek() == expected.item
            queue.remove(expected.key)
            del model[expected.key]
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(e.num_tokens for e in model.values())
        assert sorted(queue) == sorted(e.item for e in model.values())


def test_aging_makes_a_priority_worth_some_seconds_of_waiting():
    queue = ModelQueue(make_order("priority", aging_s=10.0))
    patient = entry(1, arrival=0.0, priority=1)
    for one in (patient, entry(2, arrival=9.0), entry(3, arrival=11.0), entry(4, arrival=12.0)):
        queue.push(one)
    assert drain(queue, {f"request {k}": k for k in range(1, 5)}) == [2, 1, 3, 4]


def test_without_aging_priority_is_strict():
    queue, keys = filled(
        "priority", entry(1, arrival=0.0, priority=1), entry(2, arrival=1e9, priority=0)
    )
    assert drain(queue, keys) == [2, 1]


def test_waiting_makes_more_urgent_under_policy_priority_alone():
    aging = ModelQueue(make_order("priority", aging_s=10.0))
    assert [aging.urgency(3, waited_s) for waited_s in (0, 9.9, 10, 45)] == [3, 3, 2, -1]
    assert aging.urgency(-(2**31), 100.0) == -(2**31)
    assert ModelQueue(make_order("priority")).urgency(3, 1e9) == 3
    assert (
        ModelQueue(make_order("fcfs")).urgency(3, 0)
        is ModelQueue(make_order("fair")).urgency(3, 0)
        is None
    )


def test_loads_are_known_by_tenant():
    queue, _ = filled("fcfs", entry(1, tenant="a", num_tokens=5), entry(2, tenant="b"))
    assert (queue.load_of("a").num_requests, queue.load_of("a").num_tokens) == (1, 5)
    queue.remove(1)
    assert queue.load_of("a").num_requests == queue.load_of("never").num_requests == 0


def test_tokens_ahead_are_what_goes_before_a_new_request_at_most():
    entries = [entry(1, tenant="a", num_tokens=900), entry(2, tenant="b", num_tokens=10)]
    assert filled("fcfs", *entries)[0].tokens_ahead("b") == 910
    assert filled("fair", *entries)[0].tokens_ahead("b") == 20
    assert filled("fair", *entries)[0].tokens_ahead("a") == 910
    assert filled("fair", *entries)[0].tokens_ahead("new") == 0
    assert filled("priority", *entries)[0].tokens_ahead("b") == 0


def test_fair_takes_turns_between_tenants_and_priority_inside_one():
    shares = FairShare()
    queue = ModelQueue(make_order("fair"), shares)
    entries = [
        entry(1, tenant="a", num_tokens=10),
        entry(2, tenant="a", num_tokens=10, priority=-1),
        entry(3, tenant="b", num_tokens=10),
        entry(4, tenant="b", num_tokens=10),
    ]
    keys = {one.item: one for one in entries}
    for one in entries:
        queue.push(one)
    order = []
    while (item := queue.peek()) is not None:
        order.append(keys[item].key)
        queue.remove(order[-1])
        shares.account(keys[item].tenant).charge_prompt(keys[item].num_tokens)
    assert order == [2, 3, 1, 4]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_the_order_that_is_listed_is_the_order_of_the_turns(policy):
    queue = ModelQueue(make_order(policy))
    for key in range(30):
        tenant, priority, num_tokens = f"t{key * key % 7}", key % 3, 10 + key * 37 % 90
        queue.push(entry(key, tenant=tenant, priority=priority, num_tokens=num_tokens))
    listed = queue.in_order(100)
    assert queue.in_order(7) == listed[:7]
    served = []
    while (item := queue.peek()) is not None:
        served.append(item)
        key = int(item.removeprefix("request "))
        queue.shares.account(f"t{key * key % 7}").charge_prompt(10 + key * 37 % 90)
        queue.remove(key)
    assert listed == served
