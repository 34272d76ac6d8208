"""The gpuworkers this scheduler drives, and which of them gets a request.

One task per worker describes the worker, runs an engine on it, and starts over when the worker is
lost. Requests of a lost worker are stranded (see `stranded`) until another worker takes them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from headrace.service.errors import CALL_ENDS
from headrace.vocabulary import RefusalReason, WorkerRole, WorkerState
from scheduler import choice
from scheduler.config import PoolSettings
from scheduler.core.explain import RequestExplanation
from scheduler.core.plan import RequestStatus
from scheduler.decisions import Decisions
from scheduler.engine import WorkerEngine
from scheduler.managed import ManagedWorker, WorkerLoad
from scheduler.past import joined
from scheduler.quarantine import Quarantine
from scheduler.requests import NO_ROUTER, LiveRequest, Submission
from scheduler.step_feed import StepFeed
from scheduler.stranded import StrandedRequests
from scheduler.switchboard import Switchboard
from scheduler.updates import NotTaken
from scheduler.waiting import Waiting
from scheduler.worker import (
    WorkerConnector,
    WorkerDrainedError,
    WorkerLostError,
    WorkerSpec,
    WorkerStream,
    WorkerTakenError,
    WorkerTakenOverError,
    WorkerUnavailableError,
)

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 2.0
_DRAIN_CHECK_S = 0.05

MakeEngine = Callable[[WorkerSpec, WorkerStream], WorkerEngine]


class Pool:
    """Owns the workers, their engines, and the requests that no worker has."""

    def __init__(
        self,
        make_engine: MakeEngine,
        switchboard: Switchboard,
        settings: PoolSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        """clock gives seconds since the epoch."""
        self._workers: list[ManagedWorker] = []
        self._tasks: asyncio.TaskGroup | None = None
        self._make_engine = make_engine
        self._switchboard = switchboard
        self._settings = settings
        self._stranded = StrandedRequests(
            partial(choice.engine_for_stranded, self._workers),
            switchboard,
            timeout_s=settings.requeue_timeout_s,
            clock=clock,
        )
        self._decisions = Decisions()
        self._is_draining = False

    async def run(self) -> None:
        """Drive the workers until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            for worker in self._workers:
                self._begin(worker)
            self._tasks.create_task(self._stranded.run(), name="watch requests without a worker")

    def add(self, address: str, connector: WorkerConnector) -> None:
        """Drive one more worker. The pool closes the connector."""
        worker = ManagedWorker(address, connector, Quarantine(self._settings.quarantine_s))
        self._workers.append(worker)
        if self._tasks is not None:
            self._begin(worker)

    def retire(self, address: str) -> None:
        """Give a worker nothing new, and leave the worker when it has no request left."""
        for worker in self._workers:
            if worker.address == address and not worker.is_leaving:
                worker.is_leaving = True
                if worker.engine is not None:
                    worker.engine.drain()
                elif worker.task is not None:
                    worker.task.cancel()

    def update(
        self, worker_id: str, *, is_drained: bool | None, role: WorkerRole | None
    ) -> WorkerLoad | None:
        """Drain a worker or use it again, and set its role; None leaves each as it is.

        Returns:
            The worker's load; None if no such worker is here.
        """
        worker = choice.find(self._workers, worker_id)
        if worker is None or worker.info is None:
            return None
        if is_drained is not None:
            self._decisions.set_drained(worker.info, is_drained=is_drained)
        if role is not None:
            self._decisions.set_role(worker.info, role)
        self._apply_decisions(worker, worker.info)
        logger.info(
            "an operator has decided: worker %s is %s, with role %s",
            *(worker_id, worker.reported_state, worker.info.role),
        )
        self._stranded.reassign()
        self._switchboard.changes.notify()
        return worker.load(is_draining=self._is_draining)

    def num_requests(self, address: str) -> int | None:
        """Requests on the worker at an address; None when no worker is driven there."""
        found = [worker for worker in self._workers if worker.address == address]
        if not found:
            return None
        return sum(worker.engine.num_requests for worker in found if worker.engine is not None)

    @property
    def num_workers(self) -> int:
        """Workers that are driven, or shall be."""
        return len(self._workers)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused, for good."""
        return self._is_draining

    @property
    def engines(self) -> list[WorkerEngine]:
        """Engines of the workers that are here now."""
        return [worker.engine for worker in self._workers if worker.engine is not None]

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for those that are read; False if time was up first.

        Paused requests and orphans are left to another scheduler: nobody waits for their tokens.
        """
        self._is_draining = True
        self._switchboard.changes.notify()
        try:
            async with asyncio.timeout(timeout_s):
                while any(map(_is_read, self._switchboard.requests)):  # noqa: ASYNC110 many events
                    await asyncio.sleep(_DRAIN_CHECK_S)
        except TimeoutError:
            return False
        return True

    def choose(self, submission: Submission) -> WorkerEngine | NotTaken:
        """The engine for a new request: the named worker's, else the least loaded able one."""
        if self._is_draining:
            return NotTaken(
                submission.handle, RefusalReason.DRAINING, "this scheduler is shutting down"
            )
        return choice.engine_for_new(self._workers, submission)

    def explain(self, request_id: str) -> RequestExplanation | None:
        """A request's history, on the worker that has or had it and before."""
        live = self._switchboard.requests.find(request_id)
        if live is not None:
            now, past = live.owner.explain(live), live.past
        else:
            found = (engine.explain_ended(request_id) for engine in self.engines)
            now = next((one for one in found if one is not None), None)
            past = self._switchboard.log.pasts.get(request_id)
        if now is None or past is None:
            return now or past
        return joined(past, now)

    def snapshot(self) -> list[WorkerLoad]:
        """Every worker that was described once, in order of worker_id."""
        loads = (worker.load(is_draining=self._is_draining) for worker in self._workers)
        described = [load for load in loads if load is not None]
        return sorted(described, key=lambda load: load.info.worker_id)

    @property
    def workers(self) -> Sequence[ManagedWorker]:
        """All workers; only their tasks change them."""
        return self._workers

    def waiting(self) -> Iterator[Waiting]:
        """The requests that hold no row of a worker: of each worker in order, then the others."""
        for worker in self._by_id():
            if worker.engine is not None:
                yield from worker.engine.waiting()
        yield from self._stranded.waiting()

    def step_feeds(self) -> list[tuple[WorkerSpec, StepFeed]]:
        """The steps of every worker that was described once, in order of worker_id."""
        return [(w.info, w.meter.steps) for w in self._by_id() if w.info is not None]

    def _by_id(self) -> list[ManagedWorker]:
        described = [(w.info.worker_id, w) for w in self._workers if w.info is not None]
        return [worker for _, worker in sorted(described, key=lambda pair: pair[0])]

    @property
    def num_stranded(self) -> int:
        """Requests that no worker has."""
        return len(self._stranded)

    def _apply_decisions(self, worker: ManagedWorker, info: WorkerSpec) -> None:
        worker.info = self._decisions.applied(info)
        worker.is_drained = self._decisions.is_drained(info)

    def _begin(self, worker: ManagedWorker) -> None:
        assert self._tasks is not None, "the pool runs"
        worker.task = self._tasks.create_task(self._drive(worker), name=f"drive {worker.address}")

    async def _drive(self, worker: ManagedWorker) -> None:
        """Describe the worker, run its engine until the worker is lost, and start over."""
        retry_s = _FIRST_RETRY_S
        try:
            while not worker.is_leaving:
                try:
                    num_steps = await self._drive_once(worker)
                except CALL_ENDS:
                    raise
                except BaseException:  # a bug, or a library's panic, costs this worker only
                    logger.exception("cannot use the worker at %s", worker.address)
                    num_steps = 0
                # Only a finished step shows that the worker is well again; a worker that hangs or
                # dies at once is not retried in a tight loop.
                retry_s = _FIRST_RETRY_S if num_steps else min(2 * retry_s, _MAX_RETRY_S)
                if not worker.is_leaving:
                    await asyncio.sleep(retry_s)
        finally:
            self._workers.remove(worker)
            if worker.is_leaving:
                self._let_go(worker)
            await worker.connector.close()

    def _let_go(self, worker: ManagedWorker) -> None:
        logger.info("the worker at %s is no longer ours", worker.address)
        self._switchboard.changes.notify()
        if worker.info is not None:
            # Routers find workers elsewhere.
            self._stranded.give_back(worker.info.model)

    async def _drive_once(self, worker: ManagedWorker) -> int:
        """Describe the worker and run its engine; returns the number of steps that were done."""
        info, stream = await self._reach(worker)
        try:
            # Fails where its tables do not fit in memory or no step can be planned with its limits.
            engine = self._start(worker, info, stream)
        except BaseException:
            stream.close()
            raise
        began_s = asyncio.get_running_loop().time()
        has_died = await self._run_engine(worker, engine)
        self._lose(worker, engine, has_died=has_died)
        if has_died:
            await self._leave_alone(worker, asyncio.get_running_loop().time() - began_s)
        return engine.num_steps

    async def _leave_alone(self, worker: ManagedWorker, lived_s: float) -> None:
        """Keep a worker that keeps dying in quarantine for a while."""
        if not (quarantine_s := worker.quarantine.died(lived_s)):
            return
        logger.warning(
            "worker at %s has died %d times in a row and is left alone for %g s",
            worker.address,
            *(worker.quarantine.num_deaths, quarantine_s),
        )
        worker.state = WorkerState.QUARANTINED
        self._switchboard.changes.notify()
        await asyncio.sleep(quarantine_s)
        worker.state = WorkerState.LOST
        self._switchboard.changes.notify()

    async def _reach(self, worker: ManagedWorker) -> tuple[WorkerSpec, WorkerStream]:
        """What the worker is, and a stream that it has taken, as soon as it can be had."""
        retry_s, last_reason = _FIRST_RETRY_S, ""
        while True:
            try:
                return await worker.connector.describe(), await worker.connector.execute()
            except WorkerUnavailableError as error:
                # Each reason is logged once: a wrong token must show, a long load must not flood.
                if (reason := str(error)) != last_reason:
                    logger.info("worker at %s is not ready: %s", worker.address, reason)
                    last_reason = reason
                if isinstance(error, WorkerTakenError) and worker.info is not None:
                    self._stranded.give_back(worker.info.model)
            await asyncio.sleep(retry_s)
            retry_s = min(2 * retry_s, _MAX_RETRY_S)

    def _named_apart(self, worker: ManagedWorker, info: WorkerSpec) -> WorkerSpec:
        """`info` with a worker_id that is unique in this pool: routers tell workers apart by it."""
        others = [w for w in self._workers if w is not worker and not w.is_leaving]
        ids = {w.info.worker_id for w in others if w.info is not None}
        if info.worker_id not in ids:
            return info
        apart = f"{info.worker_id}@{worker.address}"
        logger.warning(
            "the worker at %s calls itself %s, as another does, and is %s here; give each its own"
            " --worker-id",
            worker.address,
            info.worker_id,
            apart,
        )
        return replace(info, worker_id=apart)

    def _start(self, worker: ManagedWorker, info: WorkerSpec, stream: WorkerStream) -> WorkerEngine:
        info = self._named_apart(worker, info)
        worker.engine = self._make_engine(info, stream)
        worker.engine.meter = worker.meter
        self._apply_decisions(worker, worker.engine.info)
        worker.state = WorkerState.READY
        self._switchboard.changes.notify()
        logger.info(
            "worker %s (%s) is ready: model %s, %d KV blocks of %d tokens",
            *(info.worker_id, worker.address, info.model),
            *(info.num_kv_blocks, info.block_size),
        )
        self._stranded.reassign()
        return worker.engine

    async def _run_engine(self, worker: ManagedWorker, engine: WorkerEngine) -> bool:
        """Run an engine until its worker is lost; False if that is not the worker's fault."""
        # In a task of its own: a TaskGroup that fails while it is cancelled forgets that it was
        # cancelled, and we would look for the worker again in a scheduler that is shutting down.
        running = asyncio.create_task(engine.run(), name=f"run {worker.address}")
        try:
            await asyncio.wait([running])
        finally:
            running.cancel()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()  # seen, also where we are cancelled and look no further
        has_died = True
        try:
            running.result()
        except* WorkerDrainedError:
            logger.info("worker at %s is shutting down: it has no request left", worker.address)
            has_died = False
        except* WorkerTakenOverError:
            logger.warning("another scheduler has taken over the worker at %s", worker.address)
            has_died = False
        except* WorkerLostError as lost:
            logger.warning("lost worker at %s: %s", worker.address, str(lost.exceptions[0]))
        except* BaseException:
            logger.exception("the engine of the worker at %s failed", worker.address)
        return has_died

    def _lose(self, worker: ManagedWorker, engine: WorkerEngine, *, has_died: bool) -> None:
        """Take over the unfinished requests of a lost worker."""
        worker.engine = None
        worker.state = WorkerState.LOST
        worker.meter.num_losses += has_died
        self._switchboard.changes.notify()
        for request in engine.take_requests(has_died=has_died):
            if request.num_losses > self._settings.max_num_losses:
                message = f"its worker died {request.num_losses} times while running it"
                self._stranded.end(request, RequestStatus.ERROR, message)
            else:
                self._stranded.add(request)
        self._stranded.reassign()


def _is_read(request: LiveRequest) -> bool:
    """Whether a router reads what comes of a request."""
    return request.connection != NO_ROUTER and not request.is_paused
