"""The requests that wait for one model, in the order of a policy (see `policies`).

A request that is requeued after its scheduler was lost keeps its arrival time, and so its rank. A
request that no worker has credit for is skipped (`pass_over`) until the end of the round
(`put_back`); until then the next request in order is at the head.
"""

import heapq
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from headrace.lazy_heap import LazyHeap
from router.core.admission import QueueLoad
from router.core.fairness import FairShare
from router.core.policies.order import Order, QueueEntry

T = TypeVar("T")

_NO_LOAD = QueueLoad(0, 0)


class ModelQueue(Generic[T]):
    """Waiting requests by key; the caller is the only writer."""

    def __init__(self, order: Order, shares: FairShare | None = None) -> None:
        """shares decides between tenants where they take turns."""
        self.shares = shares or FairShare()
        self._order = order
        self._entry_by_key: dict[int, QueueEntry[T]] = {}
        # A heap for each tenant where tenants take turns, else one heap named "".
        self._heaps: dict[str, LazyHeap[int, QueueEntry[T]]] = {}
        self._load_by_tenant: dict[str, QueueLoad] = {}
        self._heaps_passed_over: set[str] = set()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entry_by_key)

    def __iter__(self) -> Iterator[T]:
        """The waiting requests, in no particular order."""
        return (entry.item for entry in self._entry_by_key.values())

    @property
    def load(self) -> QueueLoad:
        """The load of all tenants."""
        return QueueLoad(len(self._entry_by_key), self.num_tokens)

    @property
    def load_by_tenant(self) -> Mapping[str, QueueLoad]:
        """The load of each tenant that has a request waiting."""
        return self._load_by_tenant

    def load_of(self, tenant: str) -> QueueLoad:
        """The load of one tenant."""
        return self._load_by_tenant.get(tenant, _NO_LOAD)

    def tokens_ahead(self, tenant: str) -> int:
        """Prompt tokens served before a new request of the tenant, at most; 0 if unknown."""
        return self._order.tokens_ahead(self.load, self.load_of(tenant), len(self._load_by_tenant))

    def urgency(self, priority: int, waited_s: float) -> int | None:
        """The priority of a request that has waited so long; None: priorities do not count."""
        return self._order.urgency(priority, waited_s)

    def push(self, entry: QueueEntry[T]) -> None:
        """Queue a request; its key must not be queued already."""
        assert entry.key not in self._entry_by_key, f"{entry.key} is queued already"
        self._entry_by_key[entry.key] = entry
        self._count(entry, 1)
        name = self._heap_of(entry)
        if name not in self._heaps:
            self._heaps[name] = LazyHeap()
        self._heaps[name].push(entry.key, (self._order.rank(entry), entry.order), entry)

    def in_order(self, max_num: int) -> list[T]:
        """The first requests in order; between tenants, as if prompts alone were charged."""
        if not self._order.takes_turns:
            heap = self._heaps.get("")
            return [] if heap is None else [entry.item for entry in heap.smallest(max_num)]
        # Of equal counters the tenant that began to wait first, as in FairShare.
        turns = [
            (self.shares.account(name).virtual_tokens, number, name)
            for number, name in enumerate(self._heaps)
        ]
        heapq.heapify(turns)
        num_turns = len(turns)
        waiting: dict[str, Iterator[QueueEntry[T]]] = {}
        found: list[T] = []
        while turns and len(found) < max_num:
            virtual_tokens, _, name = turns[0]
            if name not in waiting:
                waiting[name] = iter(self._heaps[name].smallest(max_num - len(found)))
            if (entry := next(waiting[name], None)) is None:
                heapq.heappop(turns)
                continue
            found.append(entry.item)
            cost = entry.num_tokens * self.shares.account(name).prompt_cost
            heapq.heapreplace(turns, (virtual_tokens + cost, num_turns, name))
            num_turns += 1
        return found

    def peek(self) -> T | None:
        """The next request, which stays queued; None when all waiting requests are skipped."""
        if not self._order.takes_turns:
            return self._head_of("")
        while (tenant := self.shares.next()) is not None:
            if (item := self._head_of(tenant)) is not None:
                return item
            self.shares.pass_over(tenant)
        return None

    def pass_over(self) -> None:
        """Skip the request at the head until `put_back`."""
        name = self.shares.next() if self._order.takes_turns else ""
        assert name is not None, "a tenant with a waiting request has a turn"
        self._heaps[name].pass_over()
        self._heaps_passed_over.add(name)

    def put_back(self) -> None:
        """Restore the requests skipped by `pass_over` to their places."""
        while self._heaps_passed_over:
            if (heap := self._heaps.get(self._heaps_passed_over.pop())) is not None:
                heap.put_back()
        self.shares.put_back()

    def remove(self, key: int) -> bool:
        """Remove a request; False if it is not queued."""
        entry = self._entry_by_key.pop(key, None)
        if entry is None:
            return False
        self._count(entry, -1)
        name = self._heap_of(entry)
        self._heaps[name].remove(key)
        if not self._heaps[name]:
            del self._heaps[name]
        return True

    def _head_of(self, name: str) -> T | None:
        heap = self._heaps.get(name)
        head = heap.head() if heap is not None else None
        return None if head is None else head.item.item

    def _count(self, entry: QueueEntry[T], sign: int) -> None:
        """Add the entry to its tenant's load (sign 1) or subtract the entry (sign -1)."""
        tenant = entry.tenant
        before = self._load_by_tenant.get(tenant)
        old = before or _NO_LOAD
        load = QueueLoad(old.num_requests + sign, old.num_tokens + sign * entry.num_tokens)
        self.num_tokens += sign * entry.num_tokens
        if load.num_requests:
            self._load_by_tenant[tenant] = load
        else:
            del self._load_by_tenant[tenant]
        if before is None:
            self.shares.begin_waiting(tenant)
        elif not load.num_requests:
            self.shares.end_waiting(tenant)

    def _heap_of(self, entry: QueueEntry[T]) -> str:
        return entry.tenant if self._order.takes_turns else ""
