"""What the router writes to the status store: QUEUED, DISPATCHED, and ends before a dispatch.

Writing never waits: the store's own task sends records in batches. Scheduler and router write on
their own connections; the epoch and the store's transition table put them in order.
"""

from typing import Protocol

from router.request import Completion, Finish, Spec


class StatusLog(Protocol):
    """Where a router's part of each request's status goes. No call waits or fails."""

    @property
    def is_durable(self) -> bool:
        """Whether what was written lately has reached a store."""
        ...

    def queued(self, completion: Completion) -> None:
        """It waits here, for the first time or again."""
        ...

    def dispatched(self, completion: Completion) -> None:
        """It was sent to a scheduler."""
        ...

    def ended_waiting(self, completion: Completion, finish: Finish) -> None:
        """It ended while it waited here."""
        ...

    def rejected(self, spec: Spec, arrived_unix_s: float, detail: str) -> None:
        """It was never let in."""
        ...


class NoStatusLog:
    """For a router without a store."""

    is_durable = False

    def queued(self, completion: Completion) -> None:
        """Nothing."""

    def dispatched(self, completion: Completion) -> None:
        """Nothing."""

    def ended_waiting(self, completion: Completion, finish: Finish) -> None:
        """Nothing."""

    def rejected(self, spec: Spec, arrived_unix_s: float, detail: str) -> None:
        """Nothing."""
