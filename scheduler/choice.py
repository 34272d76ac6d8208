"""Which of a pool's workers gets a request."""

from collections.abc import Iterable, Iterator, Sequence

from headrace.vocabulary import RefusalReason
from scheduler.engine import WorkerEngine
from scheduler.fitness import busyness, refusal
from scheduler.managed import ManagedWorker
from scheduler.requests import LiveRequest, Submission
from scheduler.updates import NotTaken


def find(workers: Iterable[ManagedWorker], worker_id: str) -> ManagedWorker | None:
    """The worker of this id, if the worker was described once."""
    found = [w for w in workers if w.info is not None and w.info.worker_id == worker_id]
    return min(found, key=lambda worker: worker.is_leaving, default=None)


def engine_for_new(
    workers: Sequence[ManagedWorker], submission: Submission
) -> WorkerEngine | NotTaken:
    """The engine for a new request: the named worker's, else the least loaded able one."""
    if submission.worker_id:
        return _named(find(workers, submission.worker_id), submission)
    engines = [e for worker, e in _engines(workers, submission.model) if not worker.is_drained]
    if not engines:
        return NotTaken(
            submission.handle,
            RefusalReason.NO_WORKER,
            f"no worker of model {submission.model!r} is ready",
        )
    refusals = [refusal(engine, submission, submission.generated_token_ids) for engine in engines]
    able = [engine for engine, why in zip(engines, refusals, strict=True) if why is None]
    return min(able, key=busyness) if able else next(r for r in refusals if r is not None)


def engine_for_stranded(
    workers: Iterable[ManagedWorker], request: LiveRequest
) -> WorkerEngine | None:
    """The least loaded engine that can go on with a request that a worker had.

    A drained worker is better than none: the request was accepted, and must not fail of a drain.
    """
    submission, generated = request.submission, request.generated_token_ids
    able = [
        (worker.is_drained, busyness(engine), engine)
        for worker, engine in _engines(workers, submission.model)
        if refusal(engine, submission, generated) is None
    ]
    return min(able, key=lambda one: one[:2])[2] if able else None


def _named(worker: ManagedWorker | None, submission: Submission) -> WorkerEngine | NotTaken:
    name = repr(submission.worker_id)
    reason = RefusalReason.WORKER_LOST
    if worker is None:
        reason, why = RefusalReason.NO_WORKER, f"no worker {name} here"
    elif worker.engine is None:
        why = f"worker {name} is not reachable now"
    elif worker.engine.is_draining:
        why = f"worker {name} is shutting down"
    elif worker.is_drained:
        why = f"worker {name} is drained"
    elif submission.model not in {"", worker.engine.info.model}:
        reason, why = RefusalReason.NO_WORKER, f"worker {name} serves {worker.engine.info.model!r}"
    else:
        generated = submission.generated_token_ids
        return refusal(worker.engine, submission, generated) or worker.engine
    return NotTaken(submission.handle, reason, why)


def _engines(
    workers: Iterable[ManagedWorker], model: str
) -> Iterator[tuple[ManagedWorker, WorkerEngine]]:
    """Workers of a model that are here to stay, with their engines; "" is any model."""
    for worker in workers:
        engine = worker.engine
        if engine is not None and not engine.is_draining and model in {"", engine.info.model}:
            yield worker, engine
