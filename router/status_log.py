"""The router's records in the status store: QUEUED, DISPATCHED, and ends in the queue.

Recording never waits: the store's own task writes in batches. Scheduler and router write on their
own connections; the epoch and the store's transition table put the records in order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import assert_never

from headrace.status.records import OnSuperseded, Update
from headrace.status.states import State
from headrace.status.store import StatusStore
from headrace.vocabulary import FinishReason
from router.outputs import CompletionFinish
from router.request import ClientCompletion, ClientRequest, Spec


@dataclass(frozen=True, slots=True)
class Identity:
    """This router: its name, and the one process of that name."""

    router_id: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class _End:
    """An end that a scheduler was asked to record, of a completion with this name and epoch."""

    scheduler: str
    name: str
    epoch: int
    arrived_unix_s: float
    num_tokens: int
    finish: CompletionFinish


class StatusLog:
    """Records the router's part of each request's status. No call waits or fails."""

    def __init__(
        self,
        store: StatusStore,
        identity: Identity,
        *,
        encode: Callable[[ClientRequest], bytes | None],
        wall_clock: Callable[[], float],
    ) -> None:
        """encode makes a request's spec; None: it is too large to be kept.

        wall_clock is seconds since the epoch. The caller closes the store.
        """
        self._store = store
        self._identity = identity
        self._encode = encode
        self._wall_clock = wall_clock
        self._asked_by_handle: dict[int, _End] = {}

    def watch(self, on_superseded: OnSuperseded) -> None:
        """Tell of completions that another owner has taken up or ended."""
        self._store.watch(on_superseded)

    @property
    def is_configured(self) -> bool:
        """Whether there is a store, even if it does not answer now."""
        return self._store.is_configured

    @property
    def is_durable(self) -> bool:
        """Whether the last records have reached a store."""
        return self._store.is_durable

    def queued(self, completion: ClientCompletion) -> None:
        """The completion waits in the router, for the first time or again."""
        if not self._store.is_configured:
            return
        request = completion.request
        spec = None
        if not completion.index:
            spec = self._encode(request)
            request.is_kept = spec is not None
        self._record(
            completion,
            State.QUEUED,
            spec=spec,
            num_completions=len(request.completions),
            tenant=request.spec.tenant,
            model=request.spec.model,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=len(completion.token_ids),
        )

    def dispatched(self, completion: ClientCompletion) -> None:
        """The completion was sent to a scheduler."""
        if not self._store.is_configured:
            return
        link, sent = completion.flight
        self._record(
            completion,
            State.DISPATCHED,
            scheduler_id=link.scheduler_id,
            worker_id=sent.worker.worker_id,
            worker_incarnation=sent.worker.incarnation,
        )

    def ended_waiting(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        """The completion ended while it waited in the router."""
        state = _state_of(finish.reason)
        self._record(completion, state, detail=finish.message or f"{finish.reason.name} in queue")

    def end_asked(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        """A scheduler was told to end the completion, and will record that."""
        if self._store.is_configured:
            self._asked_by_handle[completion.handle] = _End(
                scheduler=completion.flight[0].name,
                name=completion.request_id,
                epoch=completion.epoch,
                arrived_unix_s=completion.arrived_unix_s,
                num_tokens=len(completion.token_ids),
                finish=finish,
            )

    def end_answered(self, handle: int, *, is_recorded: bool = True) -> None:
        """The scheduler has ended a completion, or never had it."""
        if (end := self._asked_by_handle.pop(handle, None)) is not None and not is_recorded:
            self._record_end(end)

    def scheduler_lost(self, scheduler: str) -> None:
        """Whether a scheduler still recorded the ends that it was asked for is not known.

        Without a record of its end, an aborted request could be taken up again.
        """
        asked = [h for h, end in self._asked_by_handle.items() if end.scheduler == scheduler]
        for handle in asked:
            self.end_answered(handle, is_recorded=False)

    def _record_end(self, end: _End) -> None:
        """Record an end in the scheduler's place; a record of it is left as it is."""
        now = self._wall_clock()
        for state in (State.QUEUED, _state_of(end.finish.reason)):
            self._store.record(
                Update(
                    request_id=end.name,
                    state=state,
                    epoch=end.epoch + 1,
                    time_unix_s=now,
                    create_time_unix_s=end.arrived_unix_s,
                    completion_tokens=end.num_tokens,
                    detail=end.finish.message or "ended while its scheduler was lost",
                    router_id=self._identity.router_id,
                    router_incarnation=self._identity.incarnation,
                )
            )

    def rejected(self, spec: Spec, num_prompt_tokens: int, detail: str) -> None:
        """The request was not admitted."""
        now = self._wall_clock()
        self._store.record(
            Update(
                request_id=spec.request_id,
                state=State.REJECTED,
                time_unix_s=now,
                create_time_unix_s=now,
                tenant=spec.tenant,
                model=spec.model,
                prompt_tokens=num_prompt_tokens,
                detail=detail,
                router_id=self._identity.router_id,
                router_incarnation=self._identity.incarnation,
            )
        )

    def _record(self, completion: ClientCompletion, state: State, **values: object) -> None:
        self._store.record(
            Update(
                request_id=completion.request_id,
                state=state,
                epoch=completion.epoch,
                time_unix_s=self._wall_clock(),
                create_time_unix_s=completion.arrived_unix_s,
                router_id=self._identity.router_id,
                router_incarnation=self._identity.incarnation,
                **values,  # type: ignore[arg-type]
            )
        )


def _state_of(reason: FinishReason) -> State:
    """The state of a request that ends for this reason before a scheduler has it."""
    match reason:
        case FinishReason.DEADLINE:
            return State.EXPIRED
        case FinishReason.ERROR:
            return State.ERROR
        case FinishReason.ABORTED:
            return State.ABORTED
        case FinishReason.STOP:
            return State.STOPPED
        # Only schedulers find these.
        case FinishReason.LENGTH | FinishReason.REPETITION:
            return State.ABORTED
        case never:
            assert_never(never)
