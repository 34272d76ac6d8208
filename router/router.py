"""Every live request of this process: admitting, ending and cleaning up.

Everything here runs on the event loop without awaiting, so each call sees and leaves a consistent
state. The Dispatcher knows where completions are; text is made elsewhere (see `stream`).
"""

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import assert_never

from headrace.lazy_heap import LazyHeap
from headrace.service.errors import ServiceError, aborted
from headrace.vocabulary import FinishReason
from router import outcomes
from router.core.credit import WorkerReport
from router.core.global_queue import GlobalQueue
from router.core.placement import WorkerPool
from router.core.prefix_index import prefix_of, shared_salt
from router.dispatcher import Dispatcher, Ended, Failed, Outcome, Paused
from router.gate import Gate
from router.outputs import CompletionFinish, Refusal, StepOutputs
from router.request import (
    ClientCompletion,
    ClientRequest,
    Int32Array,
    SchedulerLink,
    Spec,
    Timeline,
)
from router.rules import Rules
from router.status_log import StatusLog
from router.text.completion import CompletionText
from router.text.stop_strings import StopScanner, StopStrings
from router.text.tokenizer import TextTokenizer
from router.waker import Waker

_MAX_REMEMBERED = 20_000


@dataclass(slots=True, eq=False)
class Reservation:
    """A request id in use since the call arrived; request is None until the prompt is tokenized."""

    request_id: str
    tenant: str
    arrived: float
    arrived_unix_s: float
    request: ClientRequest | None = None
    is_aborted: bool = False


class Router:
    """Owns the requests; one per process."""

    def __init__(
        self,
        pool: WorkerPool,
        rules: Rules,
        status: StatusLog,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """clock is monotonic, wall_clock since the epoch; both in seconds."""
        self._dispatcher = Dispatcher(
            pool,
            GlobalQueue(rules.make_model_queue),
            status,
            unread=rules.unread,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.is_draining = False
        # Admitted requests, and how many of them ended in which way; the difference is live.
        self.num_accepted = 0
        self.num_ended: Counter[FinishReason] = Counter()
        self._shares_prefixes = rules.share_prefix_cache_across_tenants
        self._gate = Gate(rules, self._dispatcher, status, clock)
        self._status = status
        self._clock = clock
        self._wall_clock = wall_clock
        self._reservations: dict[str, Reservation] = {}
        self._requests: dict[int, ClientRequest] = {}
        self._deadlines: LazyHeap[int, ClientRequest] = LazyHeap()
        self._waker = Waker()
        self._owner_by_ended_id: OrderedDict[str, str] = OrderedDict()
        self._last_key = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._deadline_added = asyncio.Event()

    @property
    def pool(self) -> WorkerPool:
        return self._dispatcher.pool

    @property
    def num_queued(self) -> int:
        return self._dispatcher.num_queued

    @property
    def num_in_flight(self) -> int:
        return self._dispatcher.num_in_flight

    @property
    def num_live(self) -> int:
        """Requests whose caller is still being answered."""
        return len(self._reservations)

    @property
    def is_durable(self) -> bool:
        return self._status.is_durable

    def now(self) -> float:
        """Seconds on the monotonic clock."""
        return self._clock()

    @property
    def num_paused(self) -> int:
        """Completions that go on when their clients read."""
        return self._dispatcher.num_paused

    def scheduler_of(self, request_id: str) -> str | None:
        """The scheduler that has, or last had, the request; None if it never reached one."""
        reservation = self._reservations.get(request_id)
        if reservation is not None:
            return _scheduler_of(reservation.request) or None
        return self._owner_by_ended_id.get(request_id) or None

    @contextlib.contextmanager
    def reserve(self, request_id: str, tenant: str) -> Iterator[Reservation]:
        """Hold an id and a permit while a caller is answered, and clean up after the call."""
        if self.is_draining:
            raise outcomes.draining()
        if request_id in self._reservations:
            raise outcomes.duplicate(request_id)
        self._gate.enter(tenant)
        reservation = Reservation(request_id, tenant, self._clock(), self._wall_clock())
        self._reservations[request_id] = reservation
        self._idle.clear()
        try:
            yield reservation
        finally:
            del self._reservations[request_id]
            if reservation.request is None:
                self._gate.stop_reading(tenant)
            else:
                self._close(reservation.request)
            self._gate.leave(tenant)
            if not self._reservations:
                self._idle.set()

    def max_prompt_tokens(self, model: str) -> int:
        """The longest prompt that a ready worker takes; 0 while none is ready."""
        capacities = self.pool.capacities(model, self._clock())
        return max((capacity.num_tokens for capacity in capacities), default=0)

    def check(self, spec: Spec, least_tokens: int) -> None:
        """Raise if a request cannot be admitted whose prompt has at least so many tokens.

        Called before the prompt is tokenized: a hopeless request is refused before it costs CPU.
        """
        self._gate.check(spec, least_tokens, self._deadline(spec), is_read=False)

    def submit(
        self,
        reservation: Reservation,
        spec: Spec,
        prompt_token_ids: Int32Array,
        prompt_text: str,
        tokenizer: TextTokenizer,
    ) -> ClientRequest:
        """Admit and queue a request, or raise the ServiceError that says why not.

        prompt_text is what an echo shows. The deadline in spec is on the wall clock.
        """
        if reservation.is_aborted:
            raise aborted("ABORTED", f"{spec.request_id} was aborted before it was queued")
        deadline = self._deadline(spec)
        max_tokens = self._gate.check(spec, len(prompt_token_ids), deadline, is_read=True)
        cache_salt = shared_salt(spec.tenant, spec.cache_salt, across_tenants=self._shares_prefixes)
        request = ClientRequest(
            spec=spec,
            prompt_token_ids=prompt_token_ids,
            prompt_text=prompt_text,
            max_tokens=max_tokens,
            arrived_unix_s=reservation.arrived_unix_s,
            timeline=Timeline(arrived=reservation.arrived),
            number=self._next_key(),
            account=self._dispatcher.queue.of(spec.model).shares.account(spec.tenant),
            waker=self._waker,
            cache_salt=cache_salt,
            prefix=prefix_of(prompt_token_ids, cache_salt),
            deadline=deadline,
        )
        # Everything that can fail comes before the request is registered.
        stops = StopStrings(spec.stop) if spec.stop else None
        for index in range(spec.n):
            text = _completion_text(request, tokenizer, stops)
            request.completions.append(ClientCompletion(request, index, self._next_key(), text))
        self._gate.spend(spec.tenant, spec.n * len(prompt_token_ids))
        self._gate.stop_reading(spec.tenant)
        self.num_accepted += 1
        reservation.request = request
        self._requests[request.number] = request
        if deadline is not None:
            self._deadlines.push(request.number, deadline, request)
            self._deadline_added.set()
        for completion in request.completions:
            self._dispatcher.enqueue(completion)
        self._dispatch()
        return request

    def abort(self, request_id: str) -> bool | None:
        """Abort a request; False: the request had ended, None: this router does not know the id."""
        reservation = self._reservations.get(request_id)
        if reservation is None:
            return False if request_id in self._owner_by_ended_id else None
        if reservation.request is None:
            reservation.is_aborted = True
            return True
        if reservation.request.is_finished:
            return False
        self._end_all(reservation.request, CompletionFinish(FinishReason.ABORTED))
        self._dispatch()
        return True

    def abort_tenant(self, tenant: str) -> list[str]:
        """Abort every live request of a tenant; returns their ids."""
        of_tenant = [r.request_id for r in self._reservations.values() if r.tenant == tenant]
        return [request_id for request_id in of_tenant if self.abort(request_id)]

    def abort_all(self) -> None:
        """Abort every live request."""
        for request_id in list(self._reservations):
            self.abort(request_id)

    def expire(self) -> float | None:
        """End the requests whose deadline has passed, or that were paused for too long.

        Returns:
            Seconds until the next request is due; None if there is none.
        """
        now = self._clock()
        due = self._deadlines.pop_through(now)
        for request in due:
            self._end_all(request, CompletionFinish(FinishReason.DEADLINE))
        if due:
            self._dispatch()
        self._apply(self._dispatcher.fail_overdue())
        nearest = self._deadlines.head()
        following = [self._dispatcher.next_overdue(), nearest.rank if nearest else None]
        return min((max(0.0, when - now) for when in following if when is not None), default=None)

    async def run_deadlines(self) -> None:
        """End requests when their deadlines pass, until cancelled."""
        while True:
            self._deadline_added.clear()
            wait_s = self.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._deadline_added.wait()

    def on_connected(self, link: SchedulerLink) -> None:
        """A scheduler can be used, once its workers are reported."""
        self._dispatcher.on_connected(link)

    def on_lost(self, link: SchedulerLink) -> None:
        """The connection to a scheduler broke."""
        self._apply(self._dispatcher.on_lost(link))

    def on_report(
        self, scheduler: str, reports: Sequence[WorkerReport], *, is_draining: bool
    ) -> None:
        """A scheduler reported its workers."""
        self._apply(self._dispatcher.on_report(scheduler, reports, is_draining=is_draining))

    def on_step(self, outputs: StepOutputs) -> None:
        """A scheduler told what a step brought."""
        self._apply(self._dispatcher.on_step(outputs))

    def on_refusal(self, refusal: Refusal) -> None:
        """A scheduler did not take a completion."""
        self._apply(self._dispatcher.on_refusal(refusal))

    def on_read(self, completion: ClientCompletion) -> None:
        """More of a completion was sent to its client."""
        self._apply(self._dispatcher.on_read(completion))

    async def wait_idle(self) -> None:
        """Return once no caller is being answered."""
        await self._idle.wait()

    def _deadline(self, spec: Spec) -> float | None:
        """The deadline on the monotonic clock."""
        if spec.deadline_unix_s is None:
            return None
        return self._clock() + (spec.deadline_unix_s - self._wall_clock())

    def _dispatch(self) -> None:
        """Dispatch what workers have credit for."""
        self._apply(self._dispatcher.dispatch())

    def _apply(self, found: Sequence[Outcome]) -> None:
        """Apply what became of completions to their requests, and dispatch into freed credit."""
        while found:
            for outcome in found:
                match outcome:
                    case Ended(completion, finish):
                        self._finish(completion, finish)
                    case Failed(completion, error):
                        self._fail(completion.request, error)
                    case Paused():
                        self._deadline_added.set()
                    case _:
                        assert_never(outcome)
            found = self._dispatcher.dispatch()

    def _end(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        self._dispatcher.withdraw(completion, finish)
        self._finish(completion, finish)

    def _end_all(self, request: ClientRequest, finish: CompletionFinish) -> None:
        for completion in request.completions:
            if completion.finish is None:
                self._end(completion, finish)

    def _finish(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        request = completion.request
        completion.end(finish)
        if request.is_finished:
            request.timeline.ended = self._clock()
            self._deadlines.remove(request.number)
        request.wake()

    def _fail(self, request: ClientRequest, error: ServiceError) -> None:
        """Fail the whole request: its n completions are served all or none."""
        request.error = request.error or error
        self._end_all(request, CompletionFinish(FinishReason.ERROR, message=error.message))

    def _close(self, request: ClientRequest) -> None:
        """Forget a request whose caller is answered or gone."""
        if not request.is_finished:
            is_late = request.deadline is not None and request.deadline <= self._clock()
            reason = FinishReason.DEADLINE if is_late else FinishReason.ABORTED
            self._end_all(request, CompletionFinish(reason))
            self._dispatch()
        self._deadlines.remove(request.number)
        self._dispatcher.close(request)
        self._gate.spend(request.spec.tenant, request.num_completion_tokens)
        self.num_ended[_ending(request)] += 1
        del self._requests[request.number]
        self._owner_by_ended_id[request.spec.request_id] = _scheduler_of(request)
        if len(self._owner_by_ended_id) > _MAX_REMEMBERED:
            self._owner_by_ended_id.popitem(last=False)

    def _next_key(self) -> int:
        self._last_key += 1
        return self._last_key


def _ending(request: ClientRequest) -> FinishReason:
    """How a finished request is counted: as failed, or by its first completion."""
    finish = request.completions[0].finish
    assert finish is not None, "a request is closed when it has ended"
    return FinishReason.ERROR if request.error is not None else finish.reason


def _scheduler_of(request: ClientRequest | None) -> str:
    """The scheduler that last had a completion of the request; "" if none did."""
    links = [c.link for c in request.completions if c.link is not None] if request else []
    return links[0].name if links else ""


def _completion_text(
    request: ClientRequest, tokenizer: TextTokenizer, stops: StopStrings | None
) -> CompletionText:
    spec = request.spec
    scanner = None
    if stops is not None:
        scanner = StopScanner(stops, includes_stop=spec.include_stop_str_in_output)
    # Only the end of the prompt matters to the text that follows.
    prompt_end = request.prompt_token_ids[-64:].tolist()
    return CompletionText(
        tokenizer.detokenizer(prompt_end, keep_special_tokens=spec.keep_special_tokens),
        scanner,
        min_tokens=spec.min_tokens,
        has_offsets=spec.num_logprobs is not None,
    )
