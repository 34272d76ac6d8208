"""Everything that waits here, in a line for each model.

Models have workers of their own, so nobody waits for another model's: each has its own order and
its own shares of tenants. What may wait is limited over all lines together.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from router.core.admission import QueueLoad
from router.core.line import Line
from router.core.policies.order import QueueEntry

T = TypeVar("T")


class GlobalQueue(Generic[T]):
    """The lines by model; the caller is its only writer."""

    def __init__(self, make_line: Callable[[], Line[T]]) -> None:
        """make_line makes the line of a model that is asked for first."""
        self._make_line = make_line
        self._line_by_model: dict[str, Line[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._line_by_model.values()))

    def __iter__(self) -> Iterator[T]:
        """What waits, in no particular order."""
        return (item for line in self._line_by_model.values() for item in line)

    @property
    def lines(self) -> list[tuple[str, Line[T]]]:
        """Each model's."""
        return list(self._line_by_model.items())

    def line(self, model: str) -> Line[T]:
        """Who waits for a model."""
        line = self._line_by_model.get(model)
        if line is None:
            line = self._line_by_model[model] = self._make_line()
        return line

    @property
    def load(self) -> QueueLoad:
        """What waits, of all tenants."""
        lines = self._line_by_model.values()
        return QueueLoad(len(self), sum(line.num_tokens for line in lines))

    def load_of(self, tenant: str) -> QueueLoad:
        """What waits of one tenant."""
        loads = [line.load_of(tenant) for line in self._line_by_model.values()]
        return QueueLoad(sum(x.num_requests for x in loads), sum(x.num_tokens for x in loads))

    def push(self, entry: QueueEntry[T]) -> None:
        """Let it wait; its key must not be waiting already."""
        self.line(entry.model).push(entry)

    def remove(self, key: int) -> bool:
        """Take it out, wherever it stands; False if it does not wait."""
        return any(line.remove(key) for line in self._line_by_model.values())
