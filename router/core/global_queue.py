"""The order in which waiting requests are dispatched.

fcfs: by arrival. priority: the smaller priority first, arrival breaks ties. A request that comes
back (its scheduler was lost) keeps its arrival, so it is ahead of all that came after it. Removing
one is O(1): it is forgotten at once and its place in the heap is skipped later.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

Policy = Literal["fcfs", "priority"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    """A waiting request; arrival is a number that only grows, unique in its queue."""

    key: int
    arrival: int
    num_tokens: int
    priority: int
    item: T


class GlobalQueue(Generic[T]):
    """Waiting requests by key; the caller is its only writer."""

    def __init__(self, policy: Policy = "fcfs") -> None:
        self._policy = policy
        self._entry_by_key: dict[int, Entry[T]] = {}
        # (priority, arrival, number of the push, entry)
        self._heap: list[tuple[int, int, int, Entry[T]]] = []
        self._num_pushed = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._entry_by_key)

    def __iter__(self) -> Iterator[T]:
        """What waits, in no particular order."""
        return (entry.item for entry in self._entry_by_key.values())

    def push(self, entry: Entry[T]) -> None:
        """Let it wait; its key must not be waiting already."""
        assert entry.key not in self._entry_by_key, f"{entry.key} waits already"
        self._entry_by_key[entry.key] = entry
        self.num_tokens += entry.num_tokens
        rank = entry.priority if self._policy == "priority" else 0
        self._num_pushed += 1
        heapq.heappush(self._heap, (rank, entry.arrival, self._num_pushed, entry))

    def peek(self) -> T | None:
        """The next one, left in its place; None when nothing waits."""
        while self._heap:
            entry = self._heap[0][3]
            if self._is_waiting(entry):
                return entry.item
            heapq.heappop(self._heap)
        return None

    def remove(self, key: int) -> bool:
        """Take it out, wherever it stands; False if it does not wait."""
        entry = self._entry_by_key.pop(key, None)
        if entry is None:
            return False
        self.num_tokens -= entry.num_tokens
        # Cancelled places must not outnumber the living for long.
        if len(self._heap) > 2 * len(self._entry_by_key) + 16:
            self._heap = [place for place in self._heap if self._is_waiting(place[3])]
            heapq.heapify(self._heap)
        return True

    def _is_waiting(self, entry: Entry[T]) -> bool:
        # The same key may have come back since, with another entry.
        return self._entry_by_key.get(entry.key) is entry
