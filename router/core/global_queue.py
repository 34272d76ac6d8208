"""All waiting requests, in a queue for each model.

Each model has its own workers, so requests never wait for workers of another model: each queue has
its own order and its own shares of tenants. Limits hold over all queues together.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from router.core.admission import QueueLoad
from router.core.model_queue import ModelQueue
from router.core.policies.order import QueueEntry

T = TypeVar("T")


class GlobalQueue(Generic[T]):
    """The queues by model; the caller is the only writer."""

    def __init__(self, make_model_queue: Callable[[], ModelQueue[T]]) -> None:
        """make_model_queue makes the empty queue of a model that is used for the first time."""
        self._make_model_queue = make_model_queue
        self._queue_by_model: dict[str, ModelQueue[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queue_by_model.values()))

    def __iter__(self) -> Iterator[T]:
        """The waiting requests, in no particular order."""
        return (item for queue in self._queue_by_model.values() for item in queue)

    @property
    def by_model(self) -> list[tuple[str, ModelQueue[T]]]:
        """Each model and its queue."""
        return list(self._queue_by_model.items())

    def of(self, model: str) -> ModelQueue[T]:
        """The queue of a model."""
        queue = self._queue_by_model.get(model)
        if queue is None:
            queue = self._queue_by_model[model] = self._make_model_queue()
        return queue

    @property
    def load(self) -> QueueLoad:
        """The load of all tenants."""
        return _sum(queue.load for queue in self._queue_by_model.values())

    def load_of(self, tenant: str) -> QueueLoad:
        """The load of one tenant."""
        return _sum(queue.load_of(tenant) for queue in self._queue_by_model.values())

    def push(self, entry: QueueEntry[T]) -> None:
        """Queue a request; its key must not be queued already."""
        self.of(entry.model).push(entry)

    def remove(self, key: int) -> bool:
        """Remove a request from its queue; False if it is not queued."""
        return any(queue.remove(key) for queue in self._queue_by_model.values())


def _sum(loads: Iterable[QueueLoad]) -> QueueLoad:
    num_requests = num_tokens = 0
    for load in loads:
        num_requests += load.num_requests
        num_tokens += load.num_tokens
    return QueueLoad(num_requests, num_tokens)
