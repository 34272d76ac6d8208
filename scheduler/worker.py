"""What the engine and the pool need of a gpuworker; see rpc.gpuworker_client."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.vocabulary import WorkerRole
from scheduler.core.audit import RowTables
from scheduler.core.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What a worker said of itself; fixed for an incarnation.

    num_kv_blocks does not count the reserved null block 0. num_spec_tokens drafts, at most, come
    with a result for each request. pipeline_depth plans may usefully be without a result.
    displaces_by_priority is not the worker's to say, but ours (see `build`).
    """

    worker_id: str
    incarnation: str
    model: str
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    num_spec_tokens: int = 0
    pipeline_depth: int = 1
    displaces_by_priority: bool = False
    role: WorkerRole = WorkerRole.MIXED
    device: str = ""
    dtype: str = ""
    version: str = ""
    driver: str = ""
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log probabilities of the request in a row; the items are the wire's.

    Args:
        tokens: one per sampled token.
        prompt_tokens: of the prompt tokens computed in this step.
        largest_token_id: of all that the items name.
    """

    row: int
    tokens: Sequence[object]
    prompt_tokens: Sequence[object]
    largest_token_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """A step's result with its log probabilities; message_by_failed_row is for people.

    audit: the worker's rows after the plan, if the plan asked.
    """

    step: StepResult
    logprobs: tuple[RowLogprobs, ...]
    message_by_failed_row: dict[int, str]
    audit: RowTables | None = None


@dataclass(frozen=True, slots=True)
class Draining:
    """In place of a result: the worker is shutting down and exits when its stream ends."""


class WorkerLostError(Exception):
    """The worker's stream is broken, or its result is wrong; no further result is taken."""


class WorkerTakenOverError(WorkerLostError):
    """Another scheduler has taken over the worker, which is well."""


class WorkerDrainedError(WorkerLostError):
    """The worker is shutting down and has no request left."""


class WorkerUnavailableError(Exception):
    """The worker cannot be reached, or its model is still loading."""


class WorkerTakenError(WorkerUnavailableError):
    """A scheduler that was started later drives the worker."""


class WorkerStream(Protocol):
    """The steps of one incarnation, in order."""

    async def send(
        self,
        plan: StepPlan,
        samplings: Sequence[object],
        traceparent: str,
        *,
        wants_audit: bool = False,
    ) -> None:
        """Send a plan; samplings has one entry for each of plan.row_requests.

        Raises:
            WorkerLostError: when the stream is broken.
        """

    async def receive(self) -> WorkerResult | Draining:
        """The result of the oldest plan without one, or, once, that the worker is draining.

        Raises:
            WorkerLostError: when the stream is broken.
        """

    def close(self) -> None:
        """End the stream; plans and results in flight are lost."""


class WorkerConnector(Protocol):
    """Connects to one gpuworker address."""

    async def describe(self) -> WorkerSpec:
        """What the worker is.

        Raises:
            WorkerUnavailableError: when it does not answer or still loads its model.
        """

    async def execute(self) -> WorkerStream:
        """A new stream with every row empty; the worker ends its older stream.

        Raises:
            WorkerUnavailableError: when the worker does not take the stream; WorkerTakenError where
                another scheduler keeps it.
        """

    async def close(self) -> None:
        """Close the connection."""
