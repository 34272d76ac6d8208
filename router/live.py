"""The requests that were admitted: what schedulers tell of them, and how they end.

Everything here runs on the event loop without awaiting, so each call sees and leaves a consistent
state. The Dispatcher knows where completions are; the Router knows the callers.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

from headrace.lazy_heap import LazyHeap
from headrace.service.errors import ServiceError
from headrace.vocabulary import FinishReason
from router.core.credit import WorkerReport
from router.core.placement import WorkerPool
from router.core.prefix_index import prefix_of, shared_salt
from router.dispatcher import Dispatcher
from router.fates import Ended, Failed, Moved, Outcome, Paused
from router.metrics import Meters
from router.outputs import CompletionFinish, Refusal, StepOutputs
from router.passage import Stage
from router.request import ClientCompletion, ClientRequest, SchedulerLink, Spec, Timeline
from router.revival import Origin
from router.waker import Waker


class Callers(Protocol):
    """Who is told of requests; the router."""

    def on_unread_end(self, request: ClientRequest) -> None:
        """A request without a reader has ended."""
        ...

    def on_moved(self, request: ClientRequest, error: ServiceError) -> None:
        """Another router has taken the request over; the error says so to the caller."""
        ...


class LiveRequests:
    """Owns the admitted requests, from `register` to `close` or `release`."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        callers: Callers,
        *,
        meters: Meters,
        shares_prefixes: bool,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """clock is monotonic, wall_clock since the epoch; both in seconds."""
        self.dispatcher = dispatcher
        self.has_earlier_due = asyncio.Event()
        self._callers = callers
        self._meters = meters
        self._shares_prefixes = shares_prefixes
        self._clock = clock
        self._wall_clock = wall_clock
        self._requests: dict[int, ClientRequest] = {}
        self._deadlines: LazyHeap[int, ClientRequest] = LazyHeap()
        self._waker = Waker()
        self._keys = itertools.count(1)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def pool(self) -> WorkerPool:
        return self.dispatcher.pool

    def make(self, origin: Origin, arrived: float) -> ClientRequest:
        """A request without its completions; arrived is on the monotonic clock."""
        spec = origin.spec
        cache_salt = shared_salt(spec.tenant, spec.cache_salt, across_tenants=self._shares_prefixes)
        return ClientRequest(
            spec=spec,
            prompt_token_ids=origin.prompt_token_ids,
            prompt_text=origin.prompt_text,
            max_tokens=origin.max_tokens,
            arrived_unix_s=origin.arrived_unix_s,
            timeline=Timeline(arrived=arrived, queued=self._clock()),
            number=next(self._keys),
            account=self.dispatcher.queue.of(spec.model).shares.account(spec.tenant),
            waker=self._waker,
            traffic=self._meters.traffic(spec.model, spec.tenant),
            cache_salt=cache_salt,
            prefix=prefix_of(origin.prompt_token_ids, cache_salt),
            deadline=self.deadline(spec),
            error=origin.error,
        )

    def keys(self, num_completions: int) -> list[int]:
        """New keys for a request's completions."""
        return list(itertools.islice(self._keys, num_completions))

    def register(self, request: ClientRequest) -> None:
        """Send or queue the completions that have not ended."""
        self._meters.accepted(request)
        self._requests[request.number] = request
        if request.deadline is not None and not request.is_finished:
            self._deadlines.push(request.number, request.deadline, request)
            self.has_earlier_due.set()
        for completion in request.completions:
            if completion.finish is None:
                self.dispatcher.take_up(completion)
        if request.is_finished:
            request.timeline.ended = self._clock()
            request.wake()
            if not request.has_reader:
                self._callers.on_unread_end(request)
        self._dispatch()

    def release(self, request: ClientRequest, error: ServiceError) -> None:
        """Forget a request that goes on elsewhere, and tell its reader; nothing is cancelled."""
        for completion in request.completions:
            if completion.finish is None:
                self.dispatcher.release(completion)
        request.error = error
        request.is_released = True
        self._meters.num_released += 1
        self._forget(request)
        request.wake()

    def close(self, request: ClientRequest) -> None:
        """Forget a request that nobody reads any more, and end it if it has not ended."""
        if not request.is_finished:
            is_late = request.deadline is not None and request.deadline <= self._clock()
            reason = FinishReason.DEADLINE if is_late else FinishReason.ABORTED
            self.end_all(request, CompletionFinish(reason))
        self._meters.ended(request, _ending(request))
        self._forget(request)

    def end_all(self, request: ClientRequest, finish: CompletionFinish) -> None:
        """End a request for the router's own reason."""
        self._end_all(request, finish)
        self._dispatch()

    def fail(self, request: ClientRequest, error: ServiceError) -> None:
        """Fail a request for the router's own reason."""
        self._fail(request, error)
        self._dispatch()

    def run_on(self, request: ClientRequest) -> None:
        """A request does not wait for a reader."""
        self._apply(self.dispatcher.run_on(request))

    def deadline(self, spec: Spec) -> float | None:
        """The deadline on the monotonic clock."""
        if spec.deadline_unix_s is None:
            return None
        return self._clock() + (spec.deadline_unix_s - self._wall_clock())

    def expire(self, now: float) -> list[float]:
        """End the requests whose deadline has passed, or that were paused for too long.

        Returns:
            When more may be due.
        """
        due = self._deadlines.pop_through(now)
        for request in due:
            self._end_all(request, CompletionFinish(FinishReason.DEADLINE))
        if due:
            self._dispatch()
        self._apply(self.dispatcher.fail_overdue())
        nearest, overdue = self._deadlines.head(), self.dispatcher.next_overdue()
        return [when for when in (nearest and nearest.rank, overdue) if when is not None]

    def on_connected(self, link: SchedulerLink) -> None:
        """A scheduler can be used, once its workers are reported."""
        self.dispatcher.on_connected(link)

    def on_lost(self, link: SchedulerLink) -> None:
        """The connection to a scheduler broke."""
        self._apply(self.dispatcher.on_lost(link))

    def on_report(
        self, scheduler: str, reports: Sequence[WorkerReport], *, is_draining: bool
    ) -> None:
        """A scheduler reported its workers."""
        self._apply(self.dispatcher.on_report(scheduler, reports, is_draining=is_draining))

    def on_step(self, outputs: StepOutputs) -> None:
        """A scheduler told what a step brought."""
        self._apply(self.dispatcher.on_step(outputs))

    def on_refusal(self, refusal: Refusal) -> None:
        """A scheduler did not take a completion."""
        self._apply(self.dispatcher.on_refusal(refusal))

    def on_moved(self, handles: Sequence[int]) -> None:
        """Other routers have taken completions over from this one."""
        self._apply(self.dispatcher.on_moved(handles))

    def on_read(self, completion: ClientCompletion) -> None:
        """More of a completion was sent to its client."""
        self._apply(self.dispatcher.on_read(completion))

    def _dispatch(self) -> None:
        """Dispatch what workers have credit for."""
        self._apply(self.dispatcher.dispatch())

    def _apply(self, found: Sequence[Outcome]) -> None:
        """Apply what became of completions to their requests, and dispatch into freed credit."""
        while found:
            for outcome in found:
                match outcome:
                    case Ended(completion, finish):
                        self._finish(completion, finish)
                        if finish.reason is FinishReason.ABORTED:
                            # An abort is of all completions, wherever they are.
                            self._end_all(completion.request, finish)
                    case Failed(completion, error):
                        self._fail(completion.request, error)
                    case Moved(completion, error):
                        # Of several completions, the first to move tells.
                        if not completion.request.is_released:
                            self._callers.on_moved(completion.request, error)
                    case Paused():
                        self.has_earlier_due.set()
                    case _:
                        assert_never(outcome)
            found = self.dispatcher.dispatch()

    def _end_all(self, request: ClientRequest, finish: CompletionFinish) -> None:
        for completion in request.completions:
            if completion.finish is None:
                self.dispatcher.withdraw(completion, finish)
                self._finish(completion, finish)

    def _finish(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        request = completion.request
        completion.end(finish)
        completion.passage.enter(Stage.ENDED, self._clock())
        request.wake()
        if request.is_finished:
            request.timeline.ended = self._clock()
            self._deadlines.remove(request.number)
            if not request.has_reader:
                self._callers.on_unread_end(request)

    def _fail(self, request: ClientRequest, error: ServiceError) -> None:
        """Fail the whole request: its n completions are served all or none."""
        request.error = request.error or error
        self._end_all(request, CompletionFinish(FinishReason.ERROR, message=error.message))

    def _forget(self, request: ClientRequest) -> None:
        self._deadlines.remove(request.number)
        self.dispatcher.close(request)
        del self._requests[request.number]


def _ending(request: ClientRequest) -> FinishReason:
    """How a finished request is counted: as failed, or by its first completion."""
    finish = request.completions[0].finish
    assert finish is not None, "a request is closed when it has ended"
    return FinishReason.ERROR if request.error is not None else finish.reason
