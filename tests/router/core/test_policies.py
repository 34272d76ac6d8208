"""A policy is an object of its own: the queue asks it, and compares no names."""

from typing import get_args

import pytest

from router.core import policies
from router.core.model_queue import ModelQueue
from router.core.policies import OrderName, make_order
from router.core.policies.order import QueueEntry
from router.core.policies.priority import PriorityOrder


def entry(key, *, priority=0, num_tokens=1, tenant=""):
    return QueueEntry(
        key=key,
        model="m",
        order=key,
        arrival=float(key),
        num_tokens=num_tokens,
        priority=priority,
        tenant=tenant,
        item=key,
    )


def drained(queue):
    keys = []
    while (key := queue.peek()) is not None:
        keys.append(key)
        queue.remove(key)
    return keys


def test_every_policy_that_settings_allow_has_an_order():
    assert set(get_args(OrderName)) == set(policies._ORDER_BY_NAME)


def test_a_queue_takes_any_order():
    class ShortestFirst(PriorityOrder):
        def rank(self, entry):
            return float(entry.num_tokens)

    queue = ModelQueue(ShortestFirst(0.0))
    for key, num_tokens in enumerate([5, 3, 9]):
        queue.push(entry(key, num_tokens=num_tokens))
    assert drained(queue) == [1, 0, 2]


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", 30), ("priority", 0), ("fair", 20)])
def test_what_is_served_before_a_new_request(policy, expected):
    queue = ModelQueue(make_order(policy))
    queue.push(entry(1, num_tokens=10, tenant="a"))
    queue.push(entry(2, num_tokens=20, tenant="b"))
    assert queue.tokens_ahead("a") == expected
