"""What waits over all models: loads that limits look at, and lines that do not mix."""

from router.core.admission import QueueLoad
from router.core.global_queue import GlobalQueue
from router.core.model_queue import ModelQueue
from router.core.policies import make_order
from tests.router.core.test_model_queue import entry


def queue_of(*entries):
    queue = GlobalQueue(lambda: ModelQueue(make_order("fcfs")))
    for one in entries:
        queue.push(one)
    return queue


def test_each_model_has_an_order_of_its_own():
    queue = queue_of(entry(1, model="a"), entry(2, model="b"), entry(3, model="a"))
    assert (queue.of("a").peek(), queue.of("b").peek()) == ("request 1", "request 2")
    assert queue.of("c").peek() is None
    assert sorted(queue) == ["request 1", "request 2", "request 3"]


def test_loads_are_over_all_models():
    queue = queue_of(
        entry(1, model="a", num_tokens=5, tenant="x"),
        entry(2, model="b", num_tokens=7, tenant="x"),
        entry(3, model="b", num_tokens=9, tenant="y"),
    )
    assert queue.load == QueueLoad(3, 21)
    assert queue.load_of("x") == QueueLoad(2, 12)
    assert queue.load_of("nobody") == QueueLoad(0, 0)
    assert queue.remove(2)
    assert not queue.remove(2)
    assert (len(queue), queue.load, queue.load_of("x")) == (2, QueueLoad(2, 14), QueueLoad(1, 5))
