"""The order of the requests that wait for one model.

fcfs      by arrival.
priority  the smaller priority first, arrival breaks ties; with aging, a priority is worth
          aging_s seconds of waiting, so that a request is overtaken only by those that come
          within (difference of priorities) * aging_s after it: nobody starves.
fair      tenants take turns by what they were served (see `fairness`); inside a tenant, priority.

A request that comes back (its scheduler was lost) keeps its arrival, so it is ahead of all that
came after it. A request that no worker has credit for is passed over and put back at the end of
the round; in between, the next in order is at the head.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from headrace.lazy_heap import LazyHeap
from router.core.admission import QueueLoad
from router.core.fairness import FairShare

Policy = Literal["fcfs", "priority", "fair"]
T = TypeVar("T")

_NO_LOAD = QueueLoad(0, 0)
_MIN_PRIORITY = -(2**31)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Entry(Generic[T]):
    """A request that waits for a model.

    key is unique among those that wait; arrival is in seconds, and order, a number that only
    grows, breaks its ties. num_tokens are those of the prompt.
    """

    key: int
    model: str
    order: int
    arrival: float
    num_tokens: int
    priority: int
    tenant: str
    item: T


class Line(Generic[T]):
    """Waiting requests by key; the caller is its only writer."""

    def __init__(
        self, policy: Policy = "fcfs", shares: FairShare | None = None, *, aging_s: float = 0.0
    ) -> None:
        """shares decides between tenants under policy fair; aging_s 0 is no aging."""
        self.shares = shares or FairShare()
        self._policy = policy
        self._aging_s = aging_s
        self._entry_by_key: dict[int, Entry[T]] = {}
        # A heap for each tenant under policy fair, else one.
        self._heaps: dict[str, LazyHeap[int, Entry[T]]] = {}
        self._load_by_tenant: dict[str, QueueLoad] = {}
        self._heaps_passed_over: set[str] = set()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entry_by_key)

    def __iter__(self) -> Iterator[T]:
        """What waits, in no particular order."""
        return (entry.item for entry in self._entry_by_key.values())

    @property
    def load(self) -> QueueLoad:
        """What waits, over all tenants."""
        return QueueLoad(len(self._entry_by_key), self.num_tokens)

    def load_of(self, tenant: str) -> QueueLoad:
        """What waits of one tenant."""
        return self._load_by_tenant.get(tenant, _NO_LOAD)

    def tokens_ahead(self, tenant: str) -> int:
        """Prompt tokens that go before a new request of the tenant; at most, not exactly.

        Under policy priority it depends on who comes yet; then nothing is claimed.
        """
        match self._policy:
            case "fcfs":
                return self.num_tokens
            case "fair":
                # Each other tenant gets about one turn for each of ours, whatever it has waiting.
                ours = self.load_of(tenant).num_tokens
                return min(self.num_tokens, ours * max(1, len(self._load_by_tenant)))
            case "priority":
                return 0

    def urgency(self, priority: int, waited_s: float) -> int | None:
        """The priority that one has by now; None where it does not matter between tenants."""
        if self._policy != "priority":
            return None
        aged = int(waited_s / self._aging_s) if self._aging_s else 0
        return max(_MIN_PRIORITY, priority - aged)

    def push(self, entry: Entry[T]) -> None:
        """Let it wait; its key must not be waiting already."""
        assert entry.key not in self._entry_by_key, f"{entry.key} waits already"
        self._entry_by_key[entry.key] = entry
        self._count(entry, 1)
        heap = self._heaps.setdefault(self._heap_of(entry), LazyHeap())
        heap.push(entry.key, (self._rank(entry), entry.order), entry)

    def peek(self) -> T | None:
        """The next one, left in its place; None when nothing waits that was not passed over."""
        if self._policy != "fair":
            return self._head_of("")
        while (tenant := self.shares.next()) is not None:
            if (item := self._head_of(tenant)) is not None:
                return item
            self.shares.pass_over(tenant)
        return None

    def pass_over(self) -> None:
        """Leave the one at the head out of the order until `put_back`."""
        name = "" if self._policy != "fair" else self.shares.next()
        assert name is not None, "whoever has a request here has a turn"
        self._heaps[name].pass_over()
        self._heaps_passed_over.add(name)

    def put_back(self) -> None:
        """Restore the requests skipped by `pass_over` to their places."""
        for name in self._heaps_passed_over & self._heaps.keys():
            self._heaps[name].put_back()
        self._heaps_passed_over.clear()
        self.shares.put_back()

    def remove(self, key: int) -> bool:
        """Take it out, wherever it stands; False if it does not wait."""
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

    def _count(self, entry: Entry[T], sign: int) -> None:
        """Add the entry to its tenant's load, or take it out; an empty load is forgotten."""
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

    def _heap_of(self, entry: Entry[T]) -> str:
        return entry.tenant if self._policy == "fair" else ""

    def _rank(self, entry: Entry[T]) -> float:
        if self._policy == "fcfs":
            return 0.0
        if self._aging_s:
            return entry.arrival + entry.priority * self._aging_s
        return float(entry.priority)
