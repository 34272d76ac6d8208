"""Waiting requests in the order of the policy.

There are three queues. `skipped` holds requests that wait for something outside the scheduler (a
grammar, output in flight); they do not block the requests behind them. `held` holds long prompts
that wait for other long prefills (see `long_prefills`). All other requests are in `waiting`.
Requests whose clients do not read are `paused` and in no queue, so they cost steps nothing.
"""

from collections.abc import Iterator

from headrace.lazy_heap import Entry, LazyHeap
from scheduler.core.policy import Policy
from scheduler.core.request import Request


class WaitingQueue(LazyHeap[int, Request]):
    """Requests by key, in the order of a policy."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._num_added = 0

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._num_added += 1
        self.push(request.key, self._policy.rank(request, self._num_added), request)

    def add_front(self, request: Request) -> None:
        """Queue a request again, after a preemption or a pause."""
        self._num_added += 1
        self.push(request.key, self._policy.rank(request, -self._num_added), request)

    def first(self) -> Entry[int, Request]:
        """The next request and its rank; the queue must not be empty."""
        entry = self.head()
        assert entry is not None, "an empty queue has no head"
        return entry


class WaitingQueues:
    """The queues of one scheduler, and paused requests by key.

    Length and iteration cover the queues only.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.waiting = WaitingQueue(policy)
        self.skipped = WaitingQueue(policy)
        self.held = WaitingQueue(policy)
        self.paused: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.waiting) + len(self.skipped) + len(self.held)

    def __iter__(self) -> Iterator[Request]:
        yield from self.held
        yield from self.skipped
        yield from self.waiting

    def add(self, request: Request) -> None:
        """Queue a new request."""
        (self.skipped if request.is_blocked else self.waiting).add(request)

    @property
    def has_other_than_held(self) -> bool:
        """Whether a request waits that is not known to have a long prefill."""
        return bool(self.waiting or self.skipped)

    def next_queue(self, *, with_held: bool = True) -> WaitingQueue | None:
        """The queue whose head is considered next; None when all are empty."""
        queues = (self.held, self.skipped, self.waiting)[not with_held :]
        filled = [queue for queue in queues if queue]
        if self._policy.merges_queues:
            return min(filled, key=lambda queue: queue.first().rank, default=None)
        return filled[0] if filled else None

    def hold(self, request: Request) -> None:
        """Queue a request, which is in no queue, until long prefills have tokens left."""
        self.held.add(request)

    def put_back(self, passed_over: list[Request]) -> None:
        """Queue the requests that a step passed over, in their order, at the front of `skipped`."""
        for request in reversed(passed_over):
            self.skipped.add_front(request)

    def remove(self, request: Request) -> None:
        """Remove a request from its queue, or from the paused requests."""
        if self.paused.pop(request.key, None) is None:
            any(queue.remove(request.key) for queue in (self.waiting, self.skipped, self.held))

    def pause(self, request: Request) -> None:
        """Remove a request from its queue, if any, until `unpause`."""
        self.remove(request)
        self.paused[request.key] = request

    def unpause(self, request: Request) -> None:
        """Queue a paused request again, like a preempted one."""
        del self.paused[request.key]
        (self.skipped if request.is_blocked else self.waiting).add_front(request)
