"""Waiting requests in the order of the policy.

There are three queues: `waiting`; `skipped` for requests that were passed over because they wait on
something else (a grammar, output in flight) and hold nobody up; and `held` for long prompts that
have to wait for other long prefills (see `long_prefills`). Requests whose clients do not read are
`paused`, apart from the queues: no step looks at them, however many there are and however long.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Literal, Protocol

from headrace.lazy_heap import LazyHeap
from scheduler.core.request import Request


class WaitingQueue(Protocol):
    """A queue whose head is the next to be looked at."""

    def push(self, request: Request) -> None:
        """Add at its place for a new request."""

    def push_front(self, request: Request) -> None:
        """Add at its place for one that comes back."""

    def head(self) -> Request:
        """The next one; the queue is not empty."""

    def pop(self) -> Request:
        """Take the next one."""

    def remove(self, request: Request) -> bool:
        """Take this one out, if it is here."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served; who comes back goes to the front."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def push(self, request: Request) -> None:
        self._requests[request.key] = request

    def push_front(self, request: Request) -> None:
        self._requests[request.key] = request
        self._requests.move_to_end(request.key, last=False)

    def head(self) -> Request:
        return next(iter(self._requests.values()))

    def pop(self) -> Request:
        return self._requests.popitem(last=False)[1]

    def remove(self, request: Request) -> bool:
        return self._requests.pop(request.key, None) is not None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


class PriorityQueue:
    """Smallest (priority, arrival_time, request_id) first, wherever a request comes from."""

    def __init__(self) -> None:
        self._heap: LazyHeap[int, Request] = LazyHeap()

    def push(self, request: Request) -> None:
        # Two live requests of one id are told apart by their keys.
        self._heap.push(request.key, (request.order_key, request.key), request)

    push_front = push

    def head(self) -> Request:
        entry = self._heap.head()
        assert entry is not None, "an empty queue has no head"
        return entry.item

    def pop(self) -> Request:
        return self._heap.pop()

    def remove(self, request: Request) -> bool:
        return self._heap.remove(request.key)

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._heap)


class WaitingQueues:
    """The queues of one policy, and `paused` by key. Length and iteration are of the queues."""

    def __init__(self, policy: Literal["fcfs", "priority"]) -> None:
        self._is_priority = policy == "priority"
        make: type[FcfsQueue] | type[PriorityQueue] = (
            PriorityQueue if self._is_priority else FcfsQueue
        )
        self.waiting: WaitingQueue = make()
        self.skipped: WaitingQueue = make()
        self.held: WaitingQueue = make()
        self.paused: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.skipped) + len(self.held)

    def __iter__(self) -> Iterator[Request]:
        yield from self.held
        yield from self.skipped
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Queue a new request."""
        (self.skipped if request.is_blocked else self.waiting).push(request)

    @property
    def has_other_than_held(self) -> bool:
        """Whether a request waits that is not known to have a long prefill."""
        return bool(self.waiting or self.skipped)

    def next_queue(self, *, with_held: bool = True) -> WaitingQueue | None:
        """The queue whose head is to be looked at next; None when all are empty."""
        all_queues = (self.held, self.skipped, self.waiting)
        queues = [queue for queue in all_queues[not with_held :] if queue]
        if len(queues) < 2:
            return queues[0] if queues else None
        if self._is_priority:
            return min(queues, key=lambda queue: queue.head().order_key)
        return queues[0]

    def hold(self, request: Request) -> None:
        """Queue a request, which is in no queue, until long prefills have tokens left."""
        self.held.push(request)

    def put_back(self, passed_over: list[Request]) -> None:
        """Requests set aside in a step, in the order they were met, go before `skipped`."""
        for request in reversed(passed_over):
            self.skipped.push_front(request)

    def remove(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        if self.paused.pop(request.key, None) is None:
            any(queue.remove(request) for queue in (self.waiting, self.skipped, self.held))

    def pause(self, request: Request) -> None:
        """Take a request out of its queue, if it is in one, until `unpause`."""
        self.remove(request)
        self.paused[request.key] = request

    def unpause(self, request: Request) -> None:
        """Queue a paused request as one that comes back."""
        del self.paused[request.key]
        (self.skipped if request.is_blocked else self.waiting).push_front(request)
