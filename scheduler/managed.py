"""One worker of a pool: what the pool knows of it, and its load as routers are told."""

import asyncio
from dataclasses import dataclass, field

from headrace.vocabulary import WorkerState
from scheduler.engine import WorkerEngine
from scheduler.metrics import WorkerMeter
from scheduler.quarantine import Quarantine
from scheduler.worker import WorkerConnector, WorkerSpec


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load for routers; num_waiting: requests without a row that are not paused."""

    info: WorkerSpec
    state: WorkerState
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class ManagedWorker:
    """One worker address; owned by its task in the pool."""

    address: str
    connector: WorkerConnector
    quarantine: Quarantine
    task: asyncio.Task[None] | None = None
    # The worker gets nothing new, and is left when it has no request.
    is_leaving: bool = False
    # By an operator: the worker gets nothing new, and stays.
    is_drained: bool = False
    state: WorkerState = WorkerState.STARTING
    info: WorkerSpec | None = None
    engine: WorkerEngine | None = None
    meter: WorkerMeter = field(default_factory=WorkerMeter)

    @property
    def is_open(self) -> bool:
        """Whether the worker is here and gets new requests."""
        return self.engine is not None and not (self.engine.is_draining or self.is_drained)

    @property
    def reported_state(self) -> WorkerState:
        """The state that others are told."""
        return self.state if self.engine is None or self.is_open else WorkerState.DRAINING

    def load(self, *, is_draining: bool) -> WorkerLoad | None:
        """The load for routers; None until the worker was described once."""
        if self.info is None:
            return None
        if (engine := self.engine) is None:
            return WorkerLoad(self.info, self.state)
        state = WorkerState.DRAINING if is_draining else self.reported_state
        counts = (engine.num_free_blocks, engine.num_running, engine.num_waiting)
        return WorkerLoad(self.info, state, *counts)
