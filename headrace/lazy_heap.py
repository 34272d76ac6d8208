"""A priority queue by key whose removals are cheap and leave no garbage behind.

A removed item stays in the heap until it surfaces or until the heap is compacted, which happens as
soon as dead entries outnumber live ones. So memory is proportional to the live items, and every
operation is O(log n) amortized. Pure: any core may import it.
"""

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

# A heap this small is not compacted.
_MIN_COMPACTED = 16


class Entry(NamedTuple, Generic[K, T]):
    """A queued item. `number` counts pushes and breaks ties of rank, so items are not compared."""

    rank: Any
    number: int
    key: K
    item: T


class LazyHeap(Generic[K, T]):
    """Items by key; the smallest rank is at the head, and of equal ranks the first pushed."""

    def __init__(self) -> None:
        self._live: dict[K, Entry[K, T]] = {}
        self._heap: list[Entry[K, T]] = []
        self._passed_over: list[Entry[K, T]] = []
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, key: K) -> bool:
        return key in self._live

    def __iter__(self) -> Iterator[T]:
        """The items in order, those passed over included."""
        return (entry.item for entry in sorted(self._live.values()))

    def smallest(self, max_num: int) -> list[T]:
        """The first items in order, those passed over included."""
        return [entry.item for entry in heapq.nsmallest(max_num, self._live.values())]

    def push(self, key: K, rank: Any, item: T) -> None:
        """Queue an item; its key must not be queued. Ranks of one heap can be compared."""
        assert key not in self._live, f"{key!r} is queued already"
        self._num_pushed += 1
        entry = Entry(rank, self._num_pushed, key, item)
        self._live[key] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, key: K) -> bool:
        """Remove an item, wherever it is; False if it is not queued."""
        if self._live.pop(key, None) is None:
            return False
        if len(self._heap) > 2 * len(self._live) + _MIN_COMPACTED:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)
        return True

    def head(self) -> Entry[K, T] | None:
        """The first entry that is not passed over, left in its place; None if there is none."""
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            if live.get(entry.key) is entry:
                return entry
            heapq.heappop(heap)
        return None

    def pop(self) -> T:
        """Remove and return the item at the head; there must be one."""
        entry = self.head()
        assert entry is not None, "an empty heap has no head"
        heapq.heappop(self._heap)
        del self._live[entry.key]
        return entry.item

    def pop_through(self, rank: Any) -> list[T]:
        """Remove and return, in order, the items whose rank is not above `rank`."""
        popped = []
        while (entry := self.head()) is not None and entry.rank <= rank:
            popped.append(self.pop())
        return popped

    def pass_over(self) -> None:
        """Hide the entry at the head until `put_back`; it stays queued and keeps its place."""
        assert self.head() is not None, "an empty heap has no head"
        self._passed_over.append(heapq.heappop(self._heap))

    def put_back(self) -> None:
        """Return the entries hidden by `pass_over` to their places."""
        for entry in self._passed_over:
            if self._is_live(entry):
                heapq.heappush(self._heap, entry)
        self._passed_over.clear()

    @property
    def passed_over(self) -> list[Entry[K, T]]:
        """The entries that are hidden now, first hidden first."""
        return [entry for entry in self._passed_over if self._is_live(entry)]

    def _is_live(self, entry: Entry[K, T]) -> bool:
        # The key may have been pushed again since, with another entry.
        return self._live.get(entry.key) is entry
