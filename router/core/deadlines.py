"""Whose deadline has passed, and when the next one does."""

import heapq


class Deadlines:
    """Deadlines by key, on the caller's clock; forgetting one is O(1)."""

    def __init__(self) -> None:
        self._deadline_by_key: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._deadline_by_key)

    def add(self, key: int, deadline: float) -> None:
        """Watch it; a key has one deadline."""
        self._deadline_by_key[key] = deadline
        heapq.heappush(self._heap, (deadline, key))

    def discard(self, key: int) -> None:
        """Watch it no more."""
        if self._deadline_by_key.pop(key, None) is None:
            return
        if len(self._heap) > 2 * len(self._deadline_by_key) + 16:
            self._heap = [(when, k) for k, when in self._deadline_by_key.items()]
            heapq.heapify(self._heap)

    def next(self) -> float | None:
        """The earliest deadline; None when there is none."""
        while self._heap:
            deadline, key = self._heap[0]
            if self._deadline_by_key.get(key) == deadline:
                return deadline
            heapq.heappop(self._heap)
        return None

    def pop_due(self, now: float) -> list[int]:
        """Keys whose deadline is not after `now`, earliest first; they are watched no more."""
        due = []
        while (deadline := self.next()) is not None and deadline <= now:
            _, key = heapq.heappop(self._heap)
            del self._deadline_by_key[key]
            due.append(key)
        return due
