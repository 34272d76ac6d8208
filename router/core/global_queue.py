"""All waiting requests, in a line for each model.

Each model has its own workers, so requests never wait for workers of another model: each line has
its own order and its own shares of tenants. Limits hold over all lines together.
"""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from router.core.admission import QueueLoad
from router.core.line import Line
from router.core.policies.order import QueueEntry

T = TypeVar("T")


class GlobalQueue(Generic[T]):
    """The lines by model; the caller is the only writer."""

    def __init__(self, make_line: Callable[[], Line[T]]) -> None:
        """make_line makes the empty line of a model that is used for the first time."""
        self._make_line = make_line
        self._line_by_model: dict[str, Line[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._line_by_model.values()))

    def __iter__(self) -> Iterator[T]:
        """The waiting requests, in no particular order."""
        return (item for line in self._line_by_model.values() for item in line)

    @property
    def lines(self) -> list[tuple[str, Line[T]]]:
        """Each model's."""
        return list(self._line_by_model.items())

    def line(self, model: str) -> Line[T]:
        """The line of a model."""
        line = self._line_by_model.get(model)
        if line is None:
            line = self._line_by_model[model] = self._make_line()
        return line

    @property
    def load(self) -> QueueLoad:
        """The load of all tenants."""
        lines = self._line_by_model.values()
        return QueueLoad(len(self), sum(line.num_tokens for line in lines))

    def load_of(self, tenant: str) -> QueueLoad:
        """The load of one tenant."""
        loads = [line.load_of(tenant) for line in self._line_by_model.values()]
        return QueueLoad(sum(x.num_requests for x in loads), sum(x.num_tokens for x in loads))

    def push(self, entry: QueueEntry[T]) -> None:
        """Queue a request; its key must not be queued already."""
        self.line(entry.model).push(entry)

    def remove(self, key: int) -> bool:
        """Remove a request from its line; False if it is not queued."""
        return any(line.remove(key) for line in self._line_by_model.values())
