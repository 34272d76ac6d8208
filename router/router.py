"""Callers and their requests: who may call, which request answers a call, what a call's end means.

Everything here runs on the event loop without awaiting, so each call sees and leaves a consistent
state. What becomes of admitted requests is in `live`; text is made elsewhere (see `stream`).
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TypeVar

from headrace.lazy_heap import LazyHeap
from headrace.service.errors import ServiceError, aborted
from headrace.status.records import Superseded, parse_name
from headrace.vocabulary import FinishReason
from router import outcomes
from router.calls import Calls, Reservation
from router.core.global_queue import GlobalQueue
from router.core.placement import WorkerPool
from router.dispatcher import Dispatcher
from router.gate import Gate
from router.live import LiveRequests
from router.metrics import Meters
from router.outputs import CompletionFinish
from router.request import ClientCompletion, ClientRequest, Int32Array, Spec
from router.revival import FirstTokens, Origin, Past, from_the_beginning, revived_completions
from router.rules import Rules
from router.status_log import StatusLog
from router.text.tokenizer import TextTokenizer

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Router:
    """Answers calls with requests; one per process."""

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
        self.meters = Meters(rules.policy, rules.limits_by_tenant)
        queue = GlobalQueue(rules.make_model_queue)
        dispatcher = Dispatcher(
            *(pool, queue, status, self.meters),
            unread=rules.unread,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.is_draining = False
        self.live = LiveRequests(
            dispatcher,
            self,
            meters=self.meters,
            shares_prefixes=rules.share_prefix_cache_across_tenants,
            clock=clock,
            wall_clock=wall_clock,
        )
        self._gate = Gate(rules, dispatcher, status, clock)
        self.calls = Calls(self._gate, clock, wall_clock)
        # Requests without a reader, by when they end if nobody takes them up.
        self._orphans: LazyHeap[int, ClientRequest] = LazyHeap()
        self._orphan_ttl_s = rules.orphan_ttl_s
        self._dispatcher = dispatcher
        self._status = status
        status.watch(self.on_superseded)
        self._clock = clock
        self._wall_clock = wall_clock

    @property
    def pool(self) -> WorkerPool:
        return self._dispatcher.pool

    @property
    def queue(self) -> GlobalQueue[ClientCompletion]:
        """What waits here; only the dispatcher changes it."""
        return self._dispatcher.queue

    @property
    def num_queued(self) -> int:
        return self._dispatcher.num_queued

    @property
    def num_in_flight(self) -> int:
        return self._dispatcher.num_in_flight

    @property
    def num_live(self) -> int:
        """Requests whose caller is still being answered, or that go on without one."""
        return len(self.calls)

    @property
    def num_paused(self) -> int:
        """Completions that go on when their clients read."""
        return self._dispatcher.num_paused

    @property
    def is_durable(self) -> bool:
        return self._status.is_durable

    def now(self) -> float:
        """Seconds on the monotonic clock."""
        return self._clock()

    def reserve(
        self, request_id: str, tenant: str, body_sha256: bytes = b""
    ) -> AbstractContextManager[Reservation]:
        """Hold an id and a permit while a caller is answered, and clean up after the call."""
        if self.is_draining:
            raise outcomes.draining()
        reservation = self.calls.enter(request_id, tenant, body_sha256)
        return self._answering(reservation, reservation)

    def take_up(
        self, origin: Origin, first_tokens: Sequence[int], tokenizer: TextTokenizer
    ) -> AbstractContextManager[ClientRequest]:
        """Take a request up for a caller, and clean up after the call.

        first_tokens: for each completion, the position of the first token that the caller wants.
        An earlier caller of this router is told.
        """
        reservation, request = self._take_up(origin, first_tokens, tokenizer, has_reader=True)
        return self._answering(reservation, request)

    def recover(self, origin: Origin, tokenizer: TextTokenizer) -> None:
        """Take a request up without a caller, and finish it."""
        self._take_up(origin, [0] * len(origin.pasts), tokenizer, has_reader=False)

    def check_take_up(self, tenant: str) -> None:
        """Raise if no request of the tenant can be taken up now."""
        if self.is_draining:
            raise outcomes.draining()
        self._gate.check_permit(tenant)

    def discard(self, reservation: Reservation) -> bool:
        """Forget a request that has ended and is only kept to be read; False for any other."""
        request = reservation.request
        if request is None or request.has_reader or not request.is_finished:
            return False
        self._close(request)
        return True

    def max_prompt_tokens(self, model: str) -> int:
        """The longest prompt that a ready worker takes; 0 while none is ready."""
        capacities = self.pool.capacities(model, self._clock())
        return max((capacity.num_tokens for capacity in capacities), default=0)

    def check(self, spec: Spec, least_tokens: int) -> None:
        """Raise if a request cannot be admitted whose prompt has at least so many tokens.

        Called before the prompt is tokenized: a hopeless request is refused before it costs CPU.
        """
        self._gate.check(spec, least_tokens, self.live.deadline(spec), is_read=False)

    def submit(
        self,
        reservation: Reservation,
        spec: Spec,
        prompt_token_ids: Int32Array,
        prompt_text: str,
        tokenizer: TextTokenizer,
        *,
        first_tokens: FirstTokens = from_the_beginning,
    ) -> ClientRequest:
        """Admit and queue a request, or raise the ServiceError that says why not.

        prompt_text is what an echo shows. The deadline in spec is on the wall clock.
        """
        if reservation.error is not None:
            raise reservation.error
        num_tokens, deadline = len(prompt_token_ids), self.live.deadline(spec)
        if num_tokens == 1:  # the first token has no log probability
            spec = replace(spec, wants_prompt_logprobs=False)
        origin = Origin(
            spec=spec,
            prompt_token_ids=prompt_token_ids,
            prompt_text=prompt_text,
            max_tokens=self._gate.check(spec, num_tokens, deadline, is_read=True),
            arrived_unix_s=reservation.arrived_unix_s,
            pasts=[Past()] * spec.n,
        )
        # Everything that can fail comes before the request is registered.
        wanted = first_tokens(origin)
        request = self.live.make(origin, reservation.arrived)
        request.completions.extend(
            revived_completions(request, self.live.keys(spec.n), tokenizer, origin.pasts, wanted)
        )
        self._gate.spend(spec.tenant, spec.n * num_tokens)
        self._gate.stop_reading(spec.tenant)
        reservation.request = request
        self.live.register(request)
        return request

    def abort(self, request_id: str) -> bool | None:
        """Abort a request; False: the request had ended, None: this router does not know the id."""
        reservation = self.calls.get(request_id)
        if reservation is None:
            return False if self.calls.has_ended(request_id) else None
        if reservation.request is None:
            text = f"{request_id} was aborted before it was queued"
            reservation.error = aborted("ABORTED", text)
            return True
        if reservation.request.is_finished:
            return False
        self.live.end_all(reservation.request, CompletionFinish(FinishReason.ABORTED))
        return True

    def abort_tenant(self, tenant: str, owns: Callable[[str], bool]) -> list[str]:
        """Abort the live requests of a tenant whose ids `owns` accepts; returns the ids."""
        of_tenant = [r.request_id for r in self.calls if r.tenant == tenant and owns(r.request_id)]
        return [request_id for request_id in of_tenant if self.abort(request_id)]

    def abort_all(self) -> None:
        """Abort every live request."""
        for reservation in self.calls:
            self.abort(reservation.request_id)

    def hand_over(self, *, is_unread: bool = False) -> None:
        """Release all requests, or those without a reader, to be resumed at another router.

        Schedulers keep what they run. What no store keeps ends here.
        """
        for reservation in self.calls:
            request = reservation.request
            if is_unread and (request is None or request.has_reader):
                continue
            if request is None:
                reservation.error = outcomes.draining()
            elif self._status.is_configured and request.is_kept:
                self._release(reservation, outcomes.draining())
            elif request.is_finished and not request.has_reader:
                self._close(request)
            else:
                request.is_released = True  # its reader is told of no end, only of the error
                self.live.fail(request, outcomes.draining())

    def expire(self) -> float | None:
        """End the requests that are due: late, paused for too long, or not resumed.

        Returns:
            Seconds until the next request is due; None if there is none.
        """
        now = self._clock()
        due = self.live.expire(now)
        for request in self._orphans.pop_through(now):
            if request.is_finished:
                self._close(request)
            else:
                why = f"nobody resumed the request for {self._orphan_ttl_s:g} s"
                self.live.end_all(request, CompletionFinish(FinishReason.ABORTED, message=why))
        if (nearest := self._orphans.head()) is not None:
            due.append(nearest.rank)
        return max(0.0, min(due) - now) if due else None

    async def run_deadlines(self) -> None:
        """End requests when they are due, until cancelled."""
        while True:
            self.live.has_earlier_due.clear()
            wait_s = self.expire()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.live.has_earlier_due.wait()

    def on_unread_end(self, request: ClientRequest) -> None:
        """A request without a reader has ended: what the store does not have is kept here."""
        is_whole = all(c.finish is not None and c.finish.is_well for c in request.completions)
        if not self.is_durable and request.error is None and is_whole:
            self._keep(request)
        else:
            self._close(request)

    def on_moved(self, request: ClientRequest, error: ServiceError) -> None:
        """Another router has taken the request over; the error says so to the caller."""
        self._release(self._reservation_of(request), error)

    def on_superseded(self, superseded: Sequence[Superseded]) -> None:
        """The store says of completions that another owner has taken them up, or ended them."""
        for refused in superseded:
            request_id, index = parse_name(refused.name)
            reservation = self.calls.get(request_id)
            if reservation is None or (request := reservation.request) is None:
                continue
            completion = request.completions[index]
            if completion.epoch != refused.epoch or completion.finish is not None:
                continue
            text, ids = "%s: the store has it as %s of another owner", {"request_id": refused.name}
            logger.info(text, refused.name, refused.state, extra=ids)
            if refused.is_aborted:
                self.live.end_all(request, CompletionFinish(FinishReason.ABORTED))
                continue
            for one in request.completions:
                self._dispatcher.disown(one)
            # The other router may have nobody who reads: the caller comes back for the rest.
            self._release(reservation, outcomes.contested(request_id))

    @contextlib.contextmanager
    def _answering(self, reservation: Reservation, held: T) -> Iterator[T]:
        """The stay of a caller; what the call's end means depends on how the call ends."""
        is_answered = False
        try:
            yield held
            is_answered = True
        except ServiceError:
            is_answered = True
            raise
        finally:
            request = reservation.request
            if request is None:
                self.calls.leave(reservation)
            elif not reservation.is_over:
                if is_answered or not request.spec.goes_on:
                    self._close(request)
                else:
                    self._detach(request)

    def _detach(self, request: ClientRequest) -> None:
        """The caller is gone, and the request goes on."""
        request.has_reader = False
        request.runs_on = request.spec.recovers_at_once
        if request.is_finished:
            self.on_unread_end(request)
        elif request.runs_on:
            self.live.run_on(request)
        else:
            self._keep(request)

    def _keep(self, request: ClientRequest) -> None:
        """Wait for somebody to take a request up, but not for ever."""
        if request.number not in self._orphans:
            due = self._clock() + self._orphan_ttl_s
            self._orphans.push(request.number, due, request)
            self.live.has_earlier_due.set()

    def _take_up(
        self,
        origin: Origin,
        first_tokens: Sequence[int],
        tokenizer: TextTokenizer,
        *,
        has_reader: bool,
    ) -> tuple[Reservation, ClientRequest]:
        spec = origin.spec
        age_s = max(0.0, self._wall_clock() - origin.arrived_unix_s)
        request = self.live.make(origin, self._clock() - age_s)
        request.is_taken_up = True
        request.has_reader, request.runs_on = has_reader, not has_reader
        keys = self.live.keys(len(origin.pasts))
        request.completions.extend(
            revived_completions(request, keys, tokenizer, origin.pasts, first_tokens)
        )
        request.num_tokens_before = request.num_completion_tokens
        # Everything that can fail comes before the earlier request is released.
        earlier = self.calls.get(spec.request_id)
        if earlier is not None:
            self._release(earlier, outcomes.resumed_elsewhere(spec.request_id))
        reservation = self.calls.enter_again(spec.request_id, spec.tenant, spec.body_sha256)
        reservation.request = request
        self.live.register(request)
        return reservation, request

    def _release(self, reservation: Reservation, error: ServiceError) -> None:
        request = reservation.request
        assert request is not None, "what goes on elsewhere was admitted here"
        self.live.release(request, error)
        self._forget(request)

    def _close(self, request: ClientRequest) -> None:
        """Forget a request whose caller is answered or gone."""
        request.has_reader = True  # nobody need be told of an end now
        self.live.close(request)
        self._forget(request)
        self.calls.remember(request)

    def _forget(self, request: ClientRequest) -> None:
        self._orphans.remove(request.number)
        num_new_tokens = request.num_completion_tokens - request.num_tokens_before
        self._gate.spend(request.spec.tenant, max(0, num_new_tokens))
        self.calls.leave(self._reservation_of(request))

    def _reservation_of(self, request: ClientRequest) -> Reservation:
        reservation = self.calls.get(request.spec.request_id)
        assert reservation is not None, "an admitted request has a reservation"
        return reservation
