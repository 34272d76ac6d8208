"""Where each completion is: waiting in the queue, in flight under a handle, or gone.

Dispatch is late: a completion leaves the queue when a worker has credit for it. Messages of
schedulers come in here too. Methods return what became of completions, and the router applies that
to requests and callers, which the dispatcher does not know. No method awaits, so each call sees and
leaves a consistent state.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

from headrace.vocabulary import FinishReason, RefusalReason
from router import outcomes
from router.arrivals import Arrivals
from router.core.credit import WorkerReport
from router.core.global_queue import GlobalQueue
from router.core.pauses import PauseVerdict, UnreadLimits
from router.core.placement import Need, WorkerKey, WorkerPool
from router.core.policies.order import QueueEntry
from router.core.service_rate import ServiceRate
from router.core.suspects import TRIAL_TOKENS, Suspects
from router.core.turns import turns
from router.fates import Ended, Failed, Moved, Outcome, Paused
from router.flights import Flights
from router.metrics import Meters
from router.outputs import CompletionFinish, Refusal, StepOutputs
from router.passage import Stage
from router.request import ClientCompletion, ClientRequest, Owner, SchedulerLink
from router.restraint import Restraint
from router.status_log import StatusLog

# However a completion came back: refused, or lost with its scheduler.
_MAX_DISPATCHES = 16


class Dispatcher:
    """Owns the queue, the workers' credit, and the completions in flight or paused.

    A completion is paused when its client leaves too much unread. The scheduler then frees its KV
    blocks, and the router frees its credit. If that scheduler is lost, the paused completion waits
    outside the queue until its client has read.
    """

    def __init__(
        self,
        pool: WorkerPool,
        queue: GlobalQueue[ClientCompletion],
        status: StatusLog,
        meters: Meters,
        *,
        unread: UnreadLimits,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        """clock is monotonic, wall_clock since the epoch; both in seconds."""
        self.pool = pool
        self.queue = queue
        self._rate_by_model: defaultdict[str, ServiceRate] = defaultdict(ServiceRate)
        self._models_with_waiting: set[str] = set()
        self._restraint = Restraint(unread, clock)
        self._suspects: Suspects[ClientCompletion] = Suspects()
        self._returned: set[str] = set()  # schedulers that have connected and not reported
        self._status = status
        self._meters = meters
        self._clock = clock
        self._flights = Flights(pool)
        self._in_flight = self._flights.by_handle
        self._arrivals = Arrivals(self._in_flight, pool, meters, clock, wall_clock)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_queued(self) -> int:
        return len(self.queue) + self._suspects.num_held

    @property
    def num_paused(self) -> int:
        return self._restraint.num_paused

    def enqueue(self, completion: ClientCompletion) -> None:
        """Queue a completion; `dispatch` sends it."""
        request = completion.request
        waiting = self.queue.of(request.spec.model)
        completion.passage.queue(waiting.load_by_tenant, request.spec.tenant, self._clock())
        self.queue.push(
            QueueEntry(
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

    def take_up(self, completion: ClientCompletion) -> None:
        """Send a completion to the worker where it may still live, else queue it.

        Credit does not count there: the worker has the completion already.
        """
        worker = self._flights.worker_of(completion.owner)
        if worker is None:
            self.enqueue(completion)
            return
        self._status.queued(completion)
        self._send(completion, worker, self._need(completion, now=self._clock()))

    def release(self, completion: ClientCompletion) -> None:
        """Forget a completion that goes on elsewhere."""
        if completion in self._flights:
            self._flights.end(completion)
        else:
            self.queue.remove(completion.key)
        self._forget(completion)

    def disown(self, completion: ClientCompletion) -> None:
        """The store says that a completion is another router's: its scheduler lets it go."""
        if completion in self._flights:
            completion.flight[0].release(completion.handle)

    def withdraw(self, completion: ClientCompletion, finish: CompletionFinish) -> None:
        """End a completion for the router's own reason, wherever it is."""
        if completion in self._flights:
            self._status.end_asked(completion, finish)
            self._flights.cancel(completion, finish)
        else:
            self.queue.remove(completion.key)
            self._status.ended_waiting(completion, finish)
        self._forget(completion)

    def close(self, request: ClientRequest) -> None:
        """Nothing of the request waits for its client any more."""
        self._restraint.close(request)

    def on_read(self, completion: ClientCompletion) -> Sequence[Outcome]:
        """More of a completion was sent to its client: end its pause if enough was read."""
        if completion.is_paused and self._restraint.may_go_on(completion):
            return self._go_on(completion)
        return ()

    def run_on(self, request: ClientRequest) -> Sequence[Outcome]:
        """The request does not wait for a reader."""
        found = [self._go_on(c) for c in request.completions if c.is_paused]
        return list(chain.from_iterable(found))

    def _go_on(self, completion: ClientCompletion) -> Sequence[Outcome]:
        self._restraint.end_pause(completion)
        if completion in self._flights:
            self._flights.go_on(completion)
            return ()
        self._wait(completion)
        return self.dispatch()

    def fail_overdue(self) -> Sequence[Outcome]:
        """Fail the completions that have been paused for too long."""
        why = self._restraint.too_long
        return [_too_slow(completion, why) for completion in self._restraint.overdue()]

    def next_overdue(self) -> float | None:
        """When the next completion will have been paused for too long."""
        return self._restraint.next_overdue()

    def on_connected(self, link: SchedulerLink) -> None:
        """The link can be used, once its workers are reported."""
        self._flights.connect(link)
        self._returned.add(link.name)

    def on_report(
        self, scheduler: str, reports: Sequence[WorkerReport], *, is_draining: bool
    ) -> Sequence[Outcome]:
        """Take a scheduler's report of its workers."""
        self.pool.report(scheduler, reports, is_draining=is_draining, now=self._clock())
        if scheduler in self._returned:
            self._returned.remove(scheduler)
            self._reclaim(scheduler, reports)
        return self.dispatch()

    def _reclaim(self, scheduler: str, reports: Sequence[WorkerReport]) -> None:
        """Send what waits here, and may still run where it was, back to its worker.

        There is no credit for it: the worker's report counts it as another router's.
        """
        num_there = {
            report.worker_id: report.num_running + report.num_waiting for report in reports
        }
        for completion in [c for c in self.queue if c.owner is not None]:
            worker = self._flights.worker_of(completion.owner)
            if worker is not None and worker.scheduler == scheduler and num_there[worker.worker_id]:
                num_there[worker.worker_id] -= 1
                self.queue.remove(completion.key)
                self.take_up(completion)

    def on_lost(self, link: SchedulerLink) -> Sequence[Outcome]:
        """The link broke: the scheduler drops what came through it, and the router requeues it.

        A completion that seems to be why schedulers are lost fails instead.
        """
        taken, was_draining = self._flights.disconnect(link)
        self._status.scheduler_lost(link.name)
        self._meters.num_lost_schedulers += not was_draining
        # A scheduler that was shutting down died of no request.
        suspects = () if was_draining else [c.key for c in taken if self._is_suspect(c)]
        culprit = self._suspects.blame(suspects)
        for completion in taken:
            completion.owner = Owner(link.scheduler_id, completion.worker_id)
            completion.lose(link.scheduler_id, self._clock())
            self._requeue(completion)
        failed = [
            Failed(completion, outcomes.schedulers_lost(completion))
            for completion in taken
            if completion.key == culprit or completion.num_dispatches >= _MAX_DISPATCHES
        ]
        return failed or self.dispatch()

    def _is_suspect(self, completion: ClientCompletion) -> bool:
        """Whether a completion may be why its scheduler was lost.

        A paused completion takes no part in steps, and one that ran well there has passed.
        """
        if len(completion.token_ids) - completion.num_sent_tokens >= TRIAL_TOKENS:
            self._suspects.clear(completion.key)
            return False
        return not completion.is_paused

    def on_step(self, outputs: StepOutputs) -> Sequence[Outcome]:
        """Apply one step's outputs; completions that the router ended are unknown and skipped."""
        arrived = self._arrivals.take(outputs, self._restraint.crowd)
        was_trial = self._suspects.has_trial
        if was_trial:
            self._note_progress(outputs)
        ended: list[Outcome] = []
        failed: list[Outcome] = []
        for handle, finish in outputs.finish_by_handle.items():
            self._status.end_answered(handle)
            if (completion := self._in_flight.get(handle)) is not None:
                completion.request.num_preemptions += finish.num_preemptions
                self._flights.end(completion)
                self._forget(completion)
                stop = arrived.stop_by_handle.get(handle)
                ended.append(Ended(completion, finish if stop is None else _stopped_by(stop)))
                if finish.reason is FinishReason.ERROR and stop is None:
                    failed.append(Failed(completion, outcomes.failed(finish.message)))
        for handle, stop in arrived.stop_by_handle.items():
            if (completion := self._in_flight.get(handle)) is not None:
                self.withdraw(completion, _stopped_by(stop))
                ended.append(Ended(completion, _stopped_by(stop)))
        for completion in arrived.unread:
            if completion.handle in self._in_flight:
                failed.extend(self._restrain(completion))
        if ended or failed:
            return [*ended, *failed]
        has_trial_passed = was_trial and not self._suspects.has_trial
        return self.dispatch() if outputs.admissions or has_trial_passed else ()

    def _note_progress(self, outputs: StepOutputs) -> None:
        """Count the tokens of completions on trial."""
        for handle, count in zip(outputs.handles, outputs.num_new_tokens, strict=True):
            if (completion := self._in_flight.get(handle)) is not None:
                self._suspects.progressed(completion.key, count)

    def on_moved(self, handles: Sequence[int]) -> Sequence[Outcome]:
        """A scheduler has nothing more for these handles: other routers took them over."""
        for handle in handles:
            self._status.end_answered(handle)
        moved = [self._in_flight[handle] for handle in handles if handle in self._in_flight]
        return [
            Moved(completion, outcomes.resumed_elsewhere(completion.request.spec.request_id))
            for completion in moved
        ]

    def on_refusal(self, refusal: Refusal) -> Sequence[Outcome]:
        """A scheduler did not take a completion: try elsewhere, or fail its request."""
        self._status.end_answered(refusal.handle, is_recorded=False)
        completion = self._in_flight.get(refusal.handle)
        if completion is None:
            return ()
        if refusal.reason is RefusalReason.DUPLICATE and completion.epoch > 1:
            # Another router has it under this epoch. The store decides which of the two goes on:
            # a caller that resumes the request claims it, under a greater epoch.
            return [Moved(completion, outcomes.contested(completion.request.spec.request_id))]
        is_worth_retrying = outcomes.is_worth_retrying(refusal)
        if is_worth_retrying and completion.sent is not None:
            # Not for a refusal that is the request's own: the worker takes the next request.
            self.pool.refused(completion.sent.worker)
        self._requeue(completion)
        if is_worth_retrying and completion.num_dispatches < _MAX_DISPATCHES:
            return self.dispatch()
        return [Failed(completion, outcomes.refused(refusal, completion.request.spec))]

    def dispatch(self) -> Sequence[Outcome]:
        """Send what workers have credit for; a completion that no worker can hold fails."""
        now = self._clock()
        failed: list[Outcome] = []
        for completion in self._suspects.release():
            self.enqueue(completion)
        for model, queue in self.queue.by_model:
            if not queue and model not in self._models_with_waiting:
                continue
            num_tokens = 0
            needed_by = functools.partial(self._need, now=now)
            for completion, need, worker in turns(queue, self.pool, needed_by, now):
                queue.remove(completion.key)
                if worker is None:
                    # Admitted for a worker that has left since; no other request waits behind it.
                    error = outcomes.no_longer_fits(completion.request.spec)
                    failed.append(Failed(completion, error))
                    continue
                num_tokens += need.num_tokens
                self._send(completion, worker, need)
            had_waiting = model in self._models_with_waiting
            self.rate(model).observe(now, num_tokens=num_tokens, is_waiting=had_waiting)
            if queue:
                self._models_with_waiting.add(model)
            else:
                self._models_with_waiting.discard(model)
        return failed

    def rate(self, model: str) -> ServiceRate:
        """How fast the requests for a model leave the queue."""
        return self._rate_by_model[model]

    def _need(self, completion: ClientCompletion, *, now: float) -> Need:
        request = completion.request
        spec = request.spec
        urgency = self.queue.of(spec.model).urgency(spec.priority, now - request.timeline.arrived)
        if urgency is not None:
            completion.priority = urgency
        return Need(
            spec.model,
            completion.num_tokens,
            request.max_tokens - len(completion.token_ids),
            request.prefix,
            urgency or 0,
        )

    def _send(self, completion: ClientCompletion, worker: WorkerKey, need: Need) -> None:
        if not completion.num_dispatches:
            self._restraint.open(completion)
            # A prompt that is computed again because a scheduler was lost is not charged again.
            if not completion.request.is_taken_up:
                completion.request.account.charge_prompt(need.num_tokens)
        completion.passage.enter(Stage.DISPATCHED, self._clock())
        self._flights.begin(completion, worker, need)
        self._status.dispatched(completion)

    def _requeue(self, completion: ClientCompletion) -> None:
        """From in flight to waiting, under the next epoch, with the tokens generated so far."""
        self._flights.end(completion)
        completion.epoch += 1
        if completion.is_paused:
            # A paused completion waits for its client, not for a worker: `on_read` queues it.
            completion.passage.enter(Stage.PAUSED, self._clock())
            self._status.queued(completion)
        else:
            self._wait(completion)

    def _wait(self, completion: ClientCompletion) -> None:
        """Queue a completion again, or hold it back until it is tried."""
        if self._suspects.must_wait(completion.key):
            self._suspects.hold(completion.key, completion)
            self._status.queued(completion)
        else:
            self.enqueue(completion)

    def _restrain(self, completion: ClientCompletion) -> Sequence[Outcome]:
        """Pause or fail a completion with too much unread, or leave it running."""
        match self._restraint.verdict(completion):
            case PauseVerdict.PAUSE:
                self._restraint.begin_pause(completion)
                self._suspects.clear(completion.key)
                self._flights.pause(completion)
                return [Paused(completion)]
            case PauseVerdict.GIVE_UP:
                return [_too_slow(completion, self._restraint.too_much(completion))]
            case PauseVerdict.GO_ON:
                return ()

    def _forget(self, completion: ClientCompletion) -> None:
        """A completion that has ended is neither paused nor a suspect."""
        self._restraint.end_pause(completion)
        self._suspects.clear(completion.key)


def _stopped_by(stop: str) -> CompletionFinish:
    return CompletionFinish(FinishReason.STOP, stop=stop)


def _too_slow(completion: ClientCompletion, why: str) -> Failed:
    return Failed(completion, outcomes.too_slow(completion.request.spec, why))
