"""The order of waiting requests, and taking them out from anywhere."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.global_queue import Entry, GlobalQueue


def entry(key, *, arrival=None, num_tokens=1, priority=0):
    return Entry(key, key if arrival is None else arrival, num_tokens, priority, f"request {key}")


def drain(queue, keys_by_item):
    order = []
    while (item := queue.peek()) is not None:
        order.append(keys_by_item[item])
        queue.remove(order[-1])
    return order


def filled(policy, *entries):
    queue = GlobalQueue(policy)
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


def test_places_of_removed_requests_do_not_pile_up():
    queue = GlobalQueue()
    queue.push(entry(0))
    for key in range(1, 10_000):
        queue.push(entry(key))
        queue.remove(key)
    assert len(queue._heap) < 100


steps = st.lists(
    st.tuples(st.sampled_from(["push", "remove", "pop"]), st.integers(0, 9), st.integers(-2, 2)),
    max_size=60,
)


@given(steps=steps, policy=st.sampled_from(["fcfs", "priority"]))
def test_equals_a_sorted_list_under_any_use(steps, policy):
    queue, model = GlobalQueue(policy), {}
    for action, key, priority in steps:
        if action == "push" and key not in model:
            model[key] = entry(key, num_tokens=key, priority=priority)
            queue.push(model[key])
        elif action == "remove":
            assert queue.remove(key) == (model.pop(key, None) is not None)
        elif action == "pop" and model:

            def rank(e):
                return (e.priority if policy == "priority" else 0, e.arrival)

            expected = min(model.values(), key=rank)
            assert queue.peek() == expected.item
            queue.remove(expected.key)
            del model[expected.key]
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(e.num_tokens for e in model.values())
        assert sorted(queue) == sorted(e.item for e in model.values())
