"""The order in which waiting requests are dispatched.

fcfs      by arrival.
priority  the smaller priority first, arrival breaks ties; with aging, a priority is worth
          aging_s seconds of waiting, so that a request is overtaken only by those that come
          within (difference of priorities) * aging_s after it: nobody starves.
fair      tenants take turns by what they were served (see `fairness`); inside a tenant, priority.

A request that comes back (its scheduler was lost) keeps its arrival, so it is ahead of all that
came after it. Removing one is O(1): it is forgotten at once and its place is skipped later.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from router.core.admission import QueueLoad
from router.core.fairness import FairShare

Policy = Literal["fcfs", "priority", "fair"]
T = TypeVar("T")

_NO_LOAD = QueueLoad(0, 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Entry(Generic[T]):
    """A waiting request.

    key is unique among those that wait; arrival is in seconds, and order, a number that only
    grows, breaks its ties. num_tokens are those of the prompt.
    """

    key: int
    order: int
    arrival: float
    num_tokens: int
    priority: int
    tenant: str
    item: T


class GlobalQueue(Generic[T]):
    """Waiting requests by key; the caller is its only writer."""

    def __init__(
        self, policy: Policy = "fcfs", shares: FairShare | None = None, *, aging_s: float = 0.0
    ) -> None:
        """shares decides between tenants under policy fair; aging_s 0 is no aging."""
        self._policy = policy
        self._shares = shares or FairShare()
        self._aging_s = aging_s
        self._entry_by_key: dict[int, Entry[T]] = {}
        # A heap for each tenant under policy fair, else one; places are
        # (rank, order, number of the push, entry).
        self._lines: dict[str, list[tuple[float, int, int, Entry[T]]]] = {}
        self._load_by_tenant: dict[str, QueueLoad] = {}
        self._num_pushed = 0
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

    def push(self, entry: Entry[T]) -> None:
        """Let it wait; its key must not be waiting already."""
        assert entry.key not in self._entry_by_key, f"{entry.key} waits already"
        self._entry_by_key[entry.key] = entry
        self._count(entry, 1)
        self._num_pushed += 1
        line = self._lines.setdefault(self._line_of(entry), [])
        heapq.heappush(line, (self._rank(entry), entry.order, self._num_pushed, entry))

    def peek(self) -> T | None:
        """The next one, left in its place; None when nothing waits."""
        if not self._entry_by_key:
            return None
        tenant = self._shares.next() if self._policy == "fair" else ""
        assert tenant is not None, "whoever has a request here has a turn"
        line = self._lines[tenant]
        while not self._is_waiting(line[0][3]):
            heapq.heappop(line)
        return line[0][3].item

    def remove(self, key: int) -> bool:
        """Take it out, wherever it stands; False if it does not wait."""
        entry = self._entry_by_key.pop(key, None)
        if entry is None:
            return False
        load = self._count(entry, -1)
        name = self._line_of(entry)
        num_waiting = load.num_requests if self._policy == "fair" else len(self._entry_by_key)
        if not num_waiting:
            del self._lines[name]
        # Cancelled places must not outnumber the living for long.
        elif len(self._lines[name]) > 2 * num_waiting + 16:
            line = [place for place in self._lines[name] if self._is_waiting(place[3])]
            heapq.heapify(line)
            self._lines[name] = line
        return True

    def _count(self, entry: Entry[T], sign: int) -> QueueLoad:
        """The tenant's load with the entry, or without it; a tenant without any is forgotten."""
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
            self._shares.begin_waiting(tenant)
        elif not load.num_requests:
            self._shares.end_waiting(tenant)
        return load

    def _line_of(self, entry: Entry[T]) -> str:
        return entry.tenant if self._policy == "fair" else ""

    def _rank(self, entry: Entry[T]) -> float:
        if self._policy == "fcfs":
            return 0.0
        if self._aging_s:
            return entry.arrival + entry.priority * self._aging_s
        return float(entry.priority)

    def _is_waiting(self, entry: Entry[T]) -> bool:
        # The same key may have come back since, with another entry.
        return self._entry_by_key.get(entry.key) is entry
