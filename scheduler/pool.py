"""The gpuworkers this scheduler drives, and which of them gets a request.

One task per worker describes the worker, runs an engine on it, and starts over when the worker is
lost. Requests of a lost worker are stranded (see `stranded`) until another worker takes them.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from headrace.service.errors import CALL_ENDS
from headrace.vocabulary import RefusalReason, WorkerState
from scheduler.config import PoolSettings
from scheduler.core.explain import RequestExplanation
from scheduler.core.plan import Int32Array, RequestStatus
from scheduler.engine import WorkerEngine
from scheduler.metrics import WorkerMeter
from scheduler.past import joined
from scheduler.quarantine import Quarantine
from scheduler.requests import NO_ROUTER, LiveRequest, Submission, largest_id
from scheduler.stranded import StrandedRequests
from scheduler.switchboard import Switchboard
from scheduler.updates import NotTaken
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


@dataclass(slots=True, eq=False)
class ManagedWorker:
    """One worker address; owned by its task in the pool."""

    address: str
    connector: WorkerConnector
    quarantine: Quarantine
    state: WorkerState = WorkerState.STARTING
    info: WorkerSpec | None = None
    engine: WorkerEngine | None = None
    meter: WorkerMeter = field(default_factory=WorkerMeter)


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load for routers; num_waiting: requests without a row that are not paused."""

    info: WorkerSpec
    state: WorkerState
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0


class Pool:
    """Owns the workers, their engines, and the requests that no worker has."""

    def __init__(
        self,
        connectors: Mapping[str, WorkerConnector],
        make_engine: MakeEngine,
        switchboard: Switchboard,
        settings: PoolSettings,
        *,
        clock: Callable[[], float],
    ) -> None:
        """connectors by address; clock gives seconds since the epoch."""
        self._workers = [
            ManagedWorker(address, connector, Quarantine(settings.quarantine_s))
            for address, connector in connectors.items()
        ]
        self._make_engine = make_engine
        self._switchboard = switchboard
        self._settings = settings
        self._stranded = StrandedRequests(
            self._engine_for, switchboard, timeout_s=settings.requeue_timeout_s, clock=clock
        )
        self._is_draining = False

    async def run(self) -> None:
        """Drive the workers until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers:
                tasks.create_task(self._drive(worker), name=f"drive {worker.address}")
            tasks.create_task(self._stranded.run(), name="watch requests without a worker")

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
        if submission.worker_id:
            return self._choose_named(submission)
        engines = self._engines_of(submission.model)
        if not engines:
            return NotTaken(
                submission.handle,
                RefusalReason.NO_WORKER,
                f"no worker of model {submission.model!r} is ready",
            )
        refusals = [
            _refusal(engine, submission, submission.generated_token_ids) for engine in engines
        ]
        able = [engine for engine, why in zip(engines, refusals, strict=True) if why is None]
        return min(able, key=_busyness) if able else next(r for r in refusals if r is not None)

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
        loads = []
        for worker in self._workers:
            if worker.info is None:
                continue
            state = worker.state
            if (engine := worker.engine) is None:
                loads.append(WorkerLoad(worker.info, state))
                continue
            if self._is_draining or engine.is_draining:
                state = WorkerState.DRAINING
            counts = (engine.num_free_blocks, engine.num_running, engine.num_waiting)
            loads.append(WorkerLoad(worker.info, state, *counts))
        return sorted(loads, key=lambda load: load.info.worker_id)

    @property
    def workers(self) -> Sequence[ManagedWorker]:
        """All workers; only their tasks change them."""
        return self._workers

    @property
    def num_stranded(self) -> int:
        """Requests that no worker has."""
        return len(self._stranded)

    def _choose_named(self, submission: Submission) -> WorkerEngine | NotTaken:
        worker_id, handle = submission.worker_id, submission.handle
        worker = next(
            (w for w in self._workers if w.info is not None and w.info.worker_id == worker_id), None
        )
        if worker is None:
            return NotTaken(handle, RefusalReason.NO_WORKER, f"no worker {worker_id!r} here")
        if worker.engine is None:
            return NotTaken(
                handle, RefusalReason.WORKER_LOST, f"worker {worker_id!r} is not reachable now"
            )
        if worker.engine.is_draining:
            return NotTaken(
                handle, RefusalReason.WORKER_LOST, f"worker {worker_id!r} is shutting down"
            )
        if submission.model not in {"", worker.engine.info.model}:
            return NotTaken(
                handle,
                RefusalReason.NO_WORKER,
                f"worker {worker_id!r} serves {worker.engine.info.model!r}",
            )
        generated = submission.generated_token_ids
        return _refusal(worker.engine, submission, generated) or worker.engine

    def _engines_of(self, model: str) -> list[WorkerEngine]:
        """Engines that take new requests of a model; "" is any model."""
        return [e for e in self.engines if not e.is_draining and model in {"", e.info.model}]

    async def _drive(self, worker: ManagedWorker) -> None:
        """Describe the worker, run its engine until the worker is lost, and start over."""
        retry_s = _FIRST_RETRY_S
        try:
            while True:
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
                await asyncio.sleep(retry_s)
        finally:
            await worker.connector.close()

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
        ids = {w.info.worker_id for w in self._workers if w is not worker and w.info is not None}
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
        worker.info = worker.engine.info
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

    def _engine_for(self, request: LiveRequest) -> WorkerEngine | None:
        """The least loaded engine that can go on with a request."""
        submission, generated = request.submission, request.generated_token_ids
        able = [
            engine
            for engine in self._engines_of(submission.model)
            if _refusal(engine, submission, generated) is None
        ]
        return min(able, key=_busyness, default=None)


def _is_read(request: LiveRequest) -> bool:
    """Whether a router reads what comes of a request."""
    return request.connection != NO_ROUTER and not request.is_paused


def _busyness(engine: WorkerEngine) -> tuple[float, int]:
    """Smaller is less loaded: requests per sequence slot, then blocks in use."""
    used_blocks = engine.info.num_kv_blocks - engine.num_free_blocks
    num_requests = engine.num_requests - engine.num_paused
    return num_requests / engine.info.max_num_seqs, used_blocks


def _refusal(
    engine: WorkerEngine, submission: Submission, generated: Int32Array
) -> NotTaken | None:
    """Why this engine can never serve this request, or None.

    generated is [num_tokens] tokens of earlier epochs; they take room as the prompt does.
    """
    vocab_size, largest_token_ids = engine.info.vocab_size, submission.largest_token_ids
    if len(generated):
        largest_token_ids = {**largest_token_ids, "generated_token_ids": largest_id(generated)}
    for name, token_id in largest_token_ids.items():
        if token_id >= vocab_size:
            return NotTaken(
                submission.handle,
                RefusalReason.INVALID,
                f"{name}: must be below {vocab_size}",
                name,
            )
    if engine.end_reached(submission, generated) is not None:
        return None
    num_tokens = len(submission.prompt_token_ids) + len(generated)
    why = engine.refusal(num_tokens, submission.max_tokens)
    return NotTaken(submission.handle, RefusalReason.TOO_LONG, why) if why is not None else None
