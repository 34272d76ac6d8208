"""Where each completion is: waiting in the queue, in flight under a handle, or gone.

Dispatch is late: a completion leaves the queue when a worker has credit for it. What schedulers
say comes in here too. Nothing awaits, so each call sees and leaves a whole state. It knows
completions; requests, callers and deadlines are `router`'s.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.service.errors import ServiceError
from router import outcomes
from router.arrivals import Arrivals
from router.core.credit import WorkerReport
from router.core.global_queue import GlobalQueue
from router.core.line import Entry
from router.core.pauses import Pauses, UnreadLimits, Verdict
from router.core.placement import Need, Pool, WorkerKey
from router.core.service_rate import ServiceRate
from router.core.suspects import Suspects
from router.core.turns import turns
from router.request import (
    CancelReason,
    Completion,
    Finish,
    FinishReason,
    Refusal,
    Request,
    SchedulerLink,
    StepNews,
)
from router.status_log import StatusLog

# However a completion came back: refused, or lost with its scheduler.
_MAX_DISPATCHES = 16

_CANCEL_REASON = {
    FinishReason.STOP: CancelReason.STOP_STRING,
    FinishReason.DEADLINE: CancelReason.DEADLINE,
}


class CompletionOwner(Protocol):
    """Who is told what became of completions."""

    def completion_ended(self, completion: Completion, finish: Finish) -> None:
        """Its scheduler ended it."""
        ...

    def stop_found(self, completion: Completion, stop: str) -> None:
        """Its last token completed a stop string; it is still in flight."""
        ...

    def completion_failed(self, completion: Completion, error: ServiceError) -> None:
        """It cannot be served; it is still where it was, for the owner to withdraw."""
        ...

    def pause_began(self) -> None:
        """There is one more pause that `give_up_paused` is to end in time."""
        ...


class Dispatcher:
    """Owns the queue, the pool's credit, what is in flight, and what is paused.

    A completion is paused when its client leaves too much unread. Its scheduler sets it aside, and
    its credit is free for others; if that scheduler is lost it waits here, and not in the queue,
    until its client has read.
    """

    def __init__(
        self,
        pool: Pool,
        queue: GlobalQueue[Completion],
        status: StatusLog,
        *,
        unread: UnreadLimits,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """clock is monotonic, wall_clock since the epoch; both in seconds."""
        self.pool = pool
        self.queue = queue
        self._rate_by_model: dict[str, ServiceRate] = {}
        self._models_with_waiting: set[str] = set()
        self._unread = unread
        self._pauses: Pauses[Completion] = Pauses(unread.max_pause_s)
        self._suspects: Suspects[Completion] = Suspects()
        self.owner: CompletionOwner | None = None
        self._status = status
        self._clock = clock
        self._links: dict[str, SchedulerLink] = {}
        self._in_flight: dict[int, Completion] = {}
        self._arrivals = Arrivals(self._in_flight, pool, clock, wall_clock)
        self._num_streams = 0  # completions that were dispatched and are not closed
        self._last_handle = 0

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_queued(self) -> int:
        return len(self.queue) + self._suspects.num_held

    @property
    def num_paused(self) -> int:
        return len(self._pauses)

    def enqueue(self, completion: Completion) -> None:
        """Let it wait; `pump` sends it."""
        request = completion.request
        completion.max_unread_tokens = self._unread.of(request.spec.num_logprobs)
        self.queue.push(
            Entry(
                key=completion.key,
                model=request.spec.model,
                order=completion.key,
                arrival=request.timeline.arrived,
                num_tokens=completion.num_tokens,
                priority=request.spec.priority,
                tenant=request.spec.tenant,
                item=completion,
            )
        )
        self._status.queued(completion)

    def withdraw(self, completion: Completion, finish: Finish) -> None:
        """End it from our side, wherever it is."""
        if self._in_flight.get(completion.handle) is not completion:
            self.queue.remove(completion.key)
            self._status.ended_waiting(completion, finish)
        else:
            assert completion.link is not None, "what is in flight has a link"
            reason = _CANCEL_REASON.get(finish.reason, CancelReason.ABORTED)
            completion.link.cancel(completion, reason)
            self._land(completion)
        self._end_pause(completion)
        self._suspects.clear(completion.key)

    def close(self, request: Request) -> None:
        """Nothing of the request waits for its client any more."""
        self._num_streams -= sum(c.num_dispatches > 0 for c in request.completions)

    def has_read(self, completion: Completion) -> None:
        """More of it was sent to its client: if it is paused, it may go on."""
        if not completion.is_paused:
            return
        limit, crowd = completion.max_unread_tokens, self._unread.crowd(self._num_streams)
        if not self._unread.may_go_on(completion.num_unread, limit, crowd):
            return
        self._end_pause(completion)
        if self._in_flight.get(completion.handle) is completion:
            assert completion.link is not None, "what is in flight has a link"
            assert completion.sent is not None, "what is in flight was sent"
            self.pool.continued(completion.sent)
            completion.link.set_paused(completion.handle, is_paused=False)
        else:
            self._requeue(completion)
            self.pump()

    def give_up_paused(self) -> float | None:
        """Fail what has been paused for too long; returns when the next one will have been."""
        due = self._pauses.due(self._clock())
        for completion in due:
            # The failure of one is that of its request, so this one may have ended just now.
            if completion.is_paused:
                self._give_up(completion, f"paused for {self._unread.max_pause_s:g} s in one go")
        if due:
            self.pump()
        return self._pauses.next()

    def connected(self, link: SchedulerLink) -> None:
        """The link can be used, once its workers are reported."""
        self._links[link.name] = link

    def on_report(
        self, scheduler: str, reports: Sequence[WorkerReport], *, is_draining: bool
    ) -> None:
        """A scheduler told of its workers."""
        self.pool.report(scheduler, reports, is_draining=is_draining, now=self._clock())
        self.pump()

    def lost(self, link: SchedulerLink) -> None:
        """The link broke: the scheduler drops what came through it, and the router requeues it.

        A completion that seems to be why schedulers are lost fails instead.
        """
        self._links.pop(link.name, None)
        self.pool.forget(link.name)
        taken = [c for c in self._in_flight.values() if c.link is link]
        # A paused completion takes no part in the scheduler's steps.
        culprit = self._suspects.blame([c.key for c in taken if not c.is_paused])
        for completion in taken:
            self._take_back(completion)
        for completion in taken:
            is_spent = completion.num_dispatches >= _MAX_DISPATCHES
            if completion.finish is None and (completion.key == culprit or is_spent):
                error = outcomes.schedulers_lost(completion)
                self._told().completion_failed(completion, error)
        self.pump()

    def on_step(self, news: StepNews) -> None:
        """Take one step's news; completions that we ended ourselves are unknown and skipped."""
        arrived = self._arrivals.take(news, self._unread.crowd(self._num_streams))
        if self._suspects.has_trial:
            self._on_trial_tokens(news)
        for ended in news.ended:
            completion = self._in_flight.get(ended.handle)
            if completion is not None:
                completion.request.num_preemptions += ended.num_preemptions
                self._land(completion)
                self._end_pause(completion)
                self._suspects.clear(completion.key)
                stop = arrived.stop_by_handle.get(ended.handle)
                finish = ended.finish if stop is None else Finish(FinishReason.STOP, stop=stop)
                self._told().completion_ended(completion, finish)
        for handle, stop in arrived.stop_by_handle.items():
            if (stopped := self._in_flight.get(handle)) is not None:
                self._told().stop_found(stopped, stop)
        for unread in arrived.unread:
            if unread.finish is None:
                self._restrain(unread)
        if news.ended or news.admissions or arrived.unread or arrived.stop_by_handle:
            self.pump()

    def _on_trial_tokens(self, news: StepNews) -> None:
        """Release the next suspects when those on trial have got their tokens."""
        for handle, count in zip(news.handles, news.num_new_tokens, strict=True):
            if (completion := self._in_flight.get(handle)) is not None:
                self._suspects.progressed(completion.key, count)
        if not self._suspects.has_trial:
            self.pump()

    def on_refusal(self, refusal: Refusal) -> None:
        """A scheduler did not take a completion: try elsewhere, or fail its request."""
        completion = self._in_flight.get(refusal.handle)
        if completion is None:
            return
        is_worth_retrying = outcomes.is_worth_retrying(refusal)
        if is_worth_retrying and completion.sent is not None:
            # Not for a refusal that is the request's own: the worker takes the next request.
            self.pool.refused(completion.sent.worker)
        if is_worth_retrying and completion.num_dispatches < _MAX_DISPATCHES:
            self._take_back(completion)
        else:
            error = outcomes.refused(refusal, completion.request.spec)
            self._told().completion_failed(completion, error)
        self.pump()

    def pump(self) -> None:
        """Dispatch what workers have credit for."""
        now = self._clock()
        for completion in self._suspects.release():
            self.enqueue(completion)
        for model, line in self.queue.lines:
            num_tokens = 0
            needed_by = functools.partial(self._need, now=now)
            for completion, need, worker in turns(line, self.pool, needed_by, now):
                if worker is None:
                    # It was let in for a worker that has gone since; nobody may wait behind it.
                    error = outcomes.no_longer_fits(completion.request.spec)
                    self._told().completion_failed(completion, error)
                    continue
                num_tokens += need.num_tokens
                self._dispatch(completion, worker, need)
            had_waiting = model in self._models_with_waiting
            self.rate(model).observe(now, num_tokens=num_tokens, is_waiting=had_waiting)
            if line:
                self._models_with_waiting.add(model)
            else:
                self._models_with_waiting.discard(model)

    def rate(self, model: str) -> ServiceRate:
        """How fast the model's line moves."""
        return self._rate_by_model.setdefault(model, ServiceRate())

    def _need(self, completion: Completion, *, now: float) -> Need:
        request = completion.request
        spec = request.spec
        urgency = self.queue.line(spec.model).urgency(spec.priority, now - request.timeline.arrived)
        if urgency is not None:
            completion.priority = urgency
        return Need(
            spec.model,
            completion.num_tokens,
            request.max_tokens - len(completion.token_ids),
            request.prefix,
            urgency or 0,
        )

    def _dispatch(self, completion: Completion, worker: WorkerKey, need: Need) -> None:
        self.queue.remove(completion.key)
        if not completion.num_dispatches:
            self._num_streams += 1
            # What is lost with a scheduler and computed again is not the tenant's to pay.
            completion.request.account.charge_prompt(need.num_tokens)
        completion.handle = self._next_handle()
        completion.link = self._links[worker.scheduler]
        completion.num_dispatches += 1
        completion.is_admitted = False
        self._in_flight[completion.handle] = completion
        completion.sent = self.pool.send(worker, need)
        completion.link.submit(completion)
        self._status.dispatched(completion)

    def _take_back(self, completion: Completion) -> None:
        """From in flight to waiting, with the tokens that it has: they are not computed twice."""
        self._land(completion)
        completion.epoch += 1
        if completion.is_paused:
            # It waits for its client, not for a worker: `has_read` queues it.
            self._status.queued(completion)
        else:
            self._requeue(completion)

    def _requeue(self, completion: Completion) -> None:
        """Queue a completion again, or hold it back until it is tried."""
        if self._suspects.must_wait(completion.key):
            self._suspects.hold(completion.key, completion)
            self._status.queued(completion)
        else:
            self.enqueue(completion)

    def _land(self, completion: Completion) -> None:
        """No longer in flight; its credit is free again, which it is already in a pause."""
        del self._in_flight[completion.handle]
        assert completion.sent is not None, "what is in flight was sent"
        if not completion.is_paused:
            self.pool.finished(completion.sent, was_admitted=completion.is_admitted)

    def _restrain(self, completion: Completion) -> None:
        """More of it is unread than may be."""
        limit, crowd = completion.max_unread_tokens, self._unread.crowd(self._num_streams)
        is_paused = completion.is_paused
        match self._unread.verdict(completion.num_unread, limit, is_paused=is_paused, crowd=crowd):
            case Verdict.PAUSE:
                self._pause(completion)
            case Verdict.GIVE_UP:
                self._give_up(completion, f"more than {limit // crowd} of its tokens are unread")
            case Verdict.GO_ON:
                pass

    def _pause(self, completion: Completion) -> None:
        assert completion.link is not None, "what is in flight has a link"
        assert completion.sent is not None, "what is in flight was sent"
        completion.is_paused = True
        self._pauses.begin(completion.key, completion, self._clock())
        self._suspects.clear(completion.key)
        self.pool.paused(completion.sent)
        completion.link.set_paused(completion.handle, is_paused=True)
        self._told().pause_began()

    def _end_pause(self, completion: Completion) -> None:
        completion.request.paused_s += self._pauses.end(completion.key, self._clock())
        completion.is_paused = False

    def _give_up(self, completion: Completion, why: str) -> None:
        self._told().completion_failed(completion, outcomes.too_slow(completion.request.spec, why))

    def _next_handle(self) -> int:
        """uint32 on the wire; a live one is not given out again after it wraps."""
        while True:
            self._last_handle = self._last_handle % (2**32 - 1) + 1
            if self._last_handle not in self._in_flight:
                return self._last_handle

    def _told(self) -> CompletionOwner:
        assert self.owner is not None, "the owner is set before the first request"
        return self.owner
