"""What operators have decided of workers: which are drained, and which role each has.

Decisions are kept by worker_id, for as long as this process lives.
"""

from dataclasses import replace

from headrace.vocabulary import WorkerRole
from scheduler.worker import WorkerSpec


class Decisions:
    """A drain is of one process of a worker: the next one is there to be used. A role stays."""

    def __init__(self) -> None:
        self._drained_incarnations: dict[str, str] = {}
        self._roles: dict[str, WorkerRole] = {}

    def set_drained(self, info: WorkerSpec, *, is_drained: bool) -> None:
        """Drain the worker, or let it have requests again."""
        if is_drained:
            self._drained_incarnations[info.worker_id] = info.incarnation
        else:
            self._drained_incarnations.pop(info.worker_id, None)

    def is_drained(self, info: WorkerSpec) -> bool:
        """Whether this process of the worker is drained."""
        return self._drained_incarnations.get(info.worker_id) == info.incarnation

    def set_role(self, info: WorkerSpec, role: WorkerRole) -> None:
        """Give the worker a role."""
        self._roles[info.worker_id] = role

    def applied(self, info: WorkerSpec) -> WorkerSpec:
        """The worker with the role that was decided, or else with its own."""
        return replace(info, role=self._roles.get(info.worker_id, info.role))
