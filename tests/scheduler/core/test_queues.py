from typing import Any

import pytest

from scheduler.core.explain import History
from scheduler.core.policy import POLICIES, Policy
from scheduler.core.queues import WaitingQueue, WaitingQueues
from scheduler.core.request import Request
from tests.scheduler.core.building import new_request


def make(key: int, **fields: Any) -> Request:
    return Request(new_request(key, **fields), 16, History(f"r{key}", 0, 0.0, 0))


def ids(queue: Any) -> list[str]:
    return [request.request_id for request in queue]


def test_fcfs_puts_who_comes_back_in_front() -> None:
    queue = WaitingQueue(POLICIES["fcfs"])
    for key in (1, 2):
        queue.add(make(key))
    queue.add_front(make(0))
    assert ids(queue) == ["r0", "r1", "r2"]
    assert queue.first().item is queue.pop()
    assert ids(queue) == ["r1", "r2"]


@pytest.mark.parametrize("policy", POLICIES.values())
def test_removal_from_the_middle(policy: Policy) -> None:
    queue = WaitingQueue(policy)
    requests = [make(key) for key in range(4)]
    for request in requests:
        queue.add(request)
    assert queue.remove(requests[1].key)
    assert queue.remove(requests[0].key)
    assert not queue.remove(requests[0].key)
    assert len(queue) == 2
    assert [queue.pop().key, queue.pop().key] == [2, 3]


def test_priority_orders_by_priority_then_arrival_then_id_as_text() -> None:
    queue = WaitingQueue(POLICIES["priority"])
    for key, priority, arrival in ((2, 1, 0.0), (10, 1, 0.0), (3, 0, 9.0), (4, 1, -1.0)):
        queue.add(make(key, priority=priority, arrival_time=arrival))
    assert ids(queue) == ["r3", "r4", "r10", "r2"]
    assert [queue.pop().request_id for _ in range(4)] == ["r3", "r4", "r10", "r2"]


def test_a_request_may_return_to_the_priority_queue_that_it_was_removed_from() -> None:
    queue = WaitingQueue(POLICIES["priority"])
    request, other = make(0), make(1)
    queue.add(request)
    queue.add(other)
    queue.remove(request.key)
    queue.add(request)
    assert [queue.pop().key, queue.pop().key, len(queue)] == [0, 1, 0]


def test_removed_requests_take_no_memory_while_more_urgent_ones_keep_coming() -> None:
    queue = WaitingQueue(POLICIES["priority"])
    queue.add(make(0, priority=-1))
    request = make(1)
    for _ in range(100_000):
        queue.add(request)
        queue.remove(request.key)
        assert len(queue._heap) < 32
    assert ids(queue) == ["r0"]


def test_blocked_requests_are_set_aside_and_looked_at_first_under_fcfs() -> None:
    queues = WaitingQueues(POLICIES["fcfs"])
    queues.add(make(0))
    queues.add(make(1, needs_grammar=True))
    assert ids(queues.waiting) == ["r0"]
    assert queues.next_queue() is queues.skipped


def test_under_priority_the_more_urgent_head_is_looked_at_first() -> None:
    queues = WaitingQueues(POLICIES["priority"])
    queues.add(make(0, priority=1))
    queues.add(make(1, priority=2, needs_grammar=True))
    assert queues.next_queue() is queues.waiting
    queues.add(make(2, priority=0, needs_grammar=True))
    assert queues.next_queue() is queues.skipped


def test_requests_put_back_keep_their_order_before_older_ones() -> None:
    queues = WaitingQueues(POLICIES["fcfs"])
    queues.add(make(5, needs_grammar=True))
    queues.put_back([make(1), make(2)])
    assert ids(queues.skipped) == ["r1", "r2", "r5"]
