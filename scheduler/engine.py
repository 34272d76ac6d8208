"""Drives one incarnation of one gpuworker, step by step.

The engine's loop owns the scheduling core and everything that belongs to a step; other tasks send
the loop messages. Decisions are made synchronously, between two awaits. The engine lives as long as
the worker's stream; when the stream breaks, `take_requests` hands over the unfinished requests.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from headrace.service import telemetry
from scheduler import intake
from scheduler.audit import Auditor, LedgerAudit
from scheduler.core.explain import RequestExplanation
from scheduler.core.plan import (
    Admission,
    FinishedRequest,
    Int32Array,
    KvBlocks,
    RequestStatus,
)
from scheduler.core.scheduler import SchedulerCore
from scheduler.in_flight import InFlight
from scheduler.inbox import Cancel, Inbox, Message, Pausing
from scheduler.metrics import WorkerMeter
from scheduler.replay.recording import Recording
from scheduler.requests import FirstAdmission, LiveRequest, Submission
from scheduler.rows import Rows
from scheduler.switchboard import Switchboard
from scheduler.updates import RequestEnd
from scheduler.waiting import Waiting, waiting
from scheduler.worker import (
    Draining,
    WorkerDrainedError,
    WorkerLostError,
    WorkerResult,
    WorkerSpec,
    WorkerStream,
)

# How often an engine that has requests but an empty plan plans again: a deadline may pass, and rows
# may have to be freed in the worker.
_STUCK_RETRY_S = 0.1


class WorkerEngine:
    """The loop of one worker incarnation; `submit`, `cancel` and `set_paused` send it messages."""

    def __init__(
        self,
        core: SchedulerCore,
        stream: WorkerStream,
        info: WorkerSpec,
        *,
        switchboard: Switchboard,
        clock: Callable[[], float],
        pipeline_depth: int,
        step_timeout_s: float,
        hashes_ahead: bool = True,
        recording: Recording | None = None,
    ) -> None:
        """The engine closes the stream when `run` ends.

        Args:
            core: decides each step; a Recorder where the run is recorded. The engine owns the core.
            stream: a new stream of the worker.
            info: what the worker is.
            switchboard: publishes tokens, admissions and ends.
            clock: seconds since the epoch.
            pipeline_depth: plans that may be without a result; the core's setting.
            step_timeout_s: a worker that gives no result for this long is lost.
            hashes_ahead: hash long prompts between steps, for the prefix cache.
            recording: where `core` records its run; the engine closes it.
        """
        self._core = core
        self._recording = recording
        self._stream = stream
        self._info = info
        self._switchboard = switchboard
        self._log = switchboard.log
        self._clock = clock
        self._pipeline_depth = pipeline_depth
        self._step_timeout_s = step_timeout_s

        self._requests: dict[int, LiveRequest] = {}
        self._inbox = Inbox(core, info, switchboard, clock=clock, hashes_ahead=hashes_ahead)
        # Each result with when it came, on the event loop's clock.
        self._results: deque[tuple[WorkerResult, float]] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._rows = Rows(info.max_num_seqs, self._requests)
        self._auditor = Auditor(core, info, self._requests)
        self._wake = asyncio.Event()
        # False after an empty plan, until a message or a result comes.
        self._is_worth_planning = True
        self._last_progress_s = 0.0
        self.num_steps = 0
        # The pool gives a worker's engines the same meter.
        self.meter = WorkerMeter()
        # The worker shuts down, or is to be left: the worker gets no new requests.
        self.is_draining = False

    @property
    def info(self) -> WorkerSpec:
        return self._info

    @property
    def num_requests(self) -> int:
        """Requests of this engine, those still in its inbox included."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return self._core.num_running

    @property
    def num_paused(self) -> int:
        return self._core.num_paused

    @property
    def num_waiting(self) -> int:
        """Requests without a row that are not paused, those in the inbox included."""
        return len(self._requests) - self._core.num_running - self._core.num_paused

    def waiting(self) -> Iterator[Waiting]:
        """The requests that hold no row; see `waiting`."""
        return waiting(self._core, self._requests, self.meter.facts, self._info.worker_id)

    @property
    def kv_blocks(self) -> KvBlocks:
        return self._core.kv_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._core.num_free_blocks

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str | None:
        """Why this worker can never serve such a request, or None."""
        return self._core.refusal(num_prompt_tokens, max_tokens)

    def end_reached(self, submission: Submission, generated: Int32Array) -> RequestStatus | None:
        """How a request has ended with its last token; see intake.end_reached."""
        return intake.end_reached(submission, generated, self._info, self._core.config)

    def explain(self, request: LiveRequest) -> RequestExplanation | None:
        """The history of a live request on this worker, or None."""
        return self._core.explain(request.submission.request_id, self._clock())

    def explain_ended(self, request_id: str) -> RequestExplanation | None:
        """The history of a request that ended on this worker lately, or None."""
        return self._core.explain(request_id)

    def submit(self, request: LiveRequest) -> None:
        """Queue a request; `refusal` must have returned None for the request."""
        request.owner = self
        self._requests[request.key] = request
        self._log.submitted(request, self._info.worker_id)
        self._tell(request)

    def cancel(self, request: LiveRequest, status: RequestStatus) -> None:
        """End a request before the next step; no effect on a request that has ended."""
        self._tell(Cancel(request, status))

    def set_paused(self, request: LiveRequest, *, is_paused: bool) -> None:
        """Pause or continue a request before the next step."""
        request.is_paused = is_paused
        self._tell(Pausing(request))

    def drain(self) -> None:
        """Get no new requests; `run` ends with WorkerDrainedError when none is left."""
        self.is_draining = True
        self._switchboard.changes.notify()
        self._wake.set()

    async def audit(self, patience_s: float) -> LedgerAudit | None:
        """Audit the ledger with the next plan; None: the engine has ended. See `Auditor`."""
        answer = self._auditor.ask()
        self._is_worth_planning = True
        self._wake.set()
        return await self._auditor.wait(answer, patience_s)

    async def run(self) -> None:
        """Step until cancelled.

        Raises:
            WorkerLostError: in an ExceptionGroup, when the worker is gone.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_results(), name="receive results")
                tasks.create_task(self._step_for_ever(), name="step")
        finally:
            self._stream.close()
            self._auditor.close()
            for flight in self._in_flight:
                flight.end_span("no result came")
            if self._recording is not None:
                await self._recording.close()

    def take_requests(self, *, has_died: bool = True) -> list[LiveRequest]:
        """Requests unfinished when `run` ended, oldest first, with the tokens published so far.

        If the worker has died, a request that was in a step without a result counts a loss: it may
        be what killed the worker.
        """
        suspects = {int(key) for flight in self._in_flight for key in flight.keys}
        not_in_core, cancelled = self._inbox.give_up()
        self._publish_ends([facts for facts in cancelled if facts.key in self._requests])
        for request in list(self._requests.values()):
            done = self._core.explain_live(request.key, self._clock())
            self._log.lost(request, self._info.worker_id, self._last_step, done)
            if request.key not in not_in_core:
                self._take_from_core(request)
            request.num_losses += has_died and request.key in suspects
        taken = list(self._requests.values())
        self._requests.clear()
        return taken

    def output_token_ids(self, request: LiveRequest, start: int = 0) -> Int32Array | None:
        """[num_tokens] published so far; None if the engine failed in the step of its end."""
        # A step that failed in the middle has not been published.
        num_published = self._switchboard.requests.num_generated(request)
        token_ids = self._core.output_token_ids(request.key, start)
        if token_ids is not None:
            return token_ids[: num_published - start]
        is_not_in_core = len(request.generated_token_ids) == num_published
        return request.generated_token_ids[start:] if is_not_in_core else None

    def _take_from_core(self, request: LiveRequest) -> None:
        """Note the request's tokens. Those of a step that failed in the middle are generated again;
        an end in it is an error.
        """
        token_ids = self._core.output_token_ids(request.key)
        if token_ids is None:
            facts = intake.unscheduled_end(request, RequestStatus.ERROR)
            end = self._end(facts, "the scheduler failed in its last step")
            self._switchboard.publish(ends=[end])
            return
        num_published = self._switchboard.requests.num_generated(request)
        request.generated_token_ids = token_ids[:num_published]

    def _tell(self, message: Message) -> None:
        self._inbox.tell(message)
        self._wake.set()

    async def _receive_results(self) -> None:
        while True:
            match await self._stream.receive():
                case Draining():
                    self.drain()
                case result:
                    self._results.append((result, asyncio.get_running_loop().time()))
            self._wake.set()

    async def _step_for_ever(self) -> None:
        while True:
            self._wake.clear()
            ended = self._inbox.read()
            if ended is not None:
                self._is_worth_planning = True
                self._publish_ends(ended)
            while self._results:
                self._apply_result(*self._results.popleft())
            if self.is_draining and not self._requests:
                raise WorkerDrainedError("it has finished what it had")
            while self._is_worth_planning and len(self._in_flight) < self._pipeline_depth:
                await self._plan_step()
            if self._inbox.is_hashing:
                self._is_worth_planning |= self._inbox.hash_slice()
                await asyncio.sleep(0)
            else:
                await self._wait()

    async def _plan_step(self) -> None:
        plan = self._core.schedule(self._clock())
        self.meter.planned(plan)
        self._publish_ends(plan.expired)
        self._log.traces.waited(plan.facts.passed_over)
        for victim in plan.facts.victims:
            self._log.preempted(self._requests[victim.key], victim)
        admissions = self._note_admissions(plan.admissions) if plan.admissions else ()
        audit = self._auditor.begin()
        if audit is None and not plan.is_worth_sending:
            self._is_worth_planning = False
            return
        placed = self._rows.assign(plan)
        keys, asking = self._rows.keys_in(plan), self._rows.asking_in(plan)
        span = self._log.traces.begin_step(plan, keys, placed)
        now_s = asyncio.get_running_loop().time()
        if not self._in_flight:
            self._last_progress_s = now_s
        ids = self._rows.request_ids
        step = self.meter.sent(plan, self._core, self.num_waiting, ids, now_s)
        self._in_flight.append(InFlight(plan, keys, now_s, admissions, span, asking, audit, step))
        self._switchboard.changes.notify()
        await self._stream.send(
            plan,
            [request.submission.sampling for request in placed],
            telemetry.traceparent_of(span) if span is not None else "",
            wants_audit=audit is not None,
        )

    @property
    def _last_step(self) -> int:
        """The step that was planned last, as timelines count the steps."""
        return max(0, self._core.state.step_id - 1)

    def _note_admissions(
        self, admissions: Sequence[Admission]
    ) -> tuple[tuple[LiveRequest, FirstAdmission], ...]:
        """Log admissions; those that routers are to be told of with the step's result."""
        first = []
        for admission in admissions:
            request = self._requests[admission.key]
            self._log.admitted(request, admission.num_cached_tokens, self._info, self._last_step)
            request.is_admitted = True
            if request.admission is None:
                facts = FirstAdmission(
                    admission.num_cached_tokens, self._clock(), self._info.worker_id
                )
                first.append((request, facts))
        return tuple(first)

    def _apply_result(self, result: WorkerResult, came_s: float) -> None:
        if not self._in_flight:
            raise WorkerLostError("it sent a result that no plan asked for")
        flight = self._in_flight.popleft()
        flight.check(result, self._info)
        if flight.audit is not None:
            self._auditor.end(flight.audit, result.audit)
        flight.end_span()
        now = self._clock()
        output = self._core.update(result.step, now)
        logprobs = flight.new_logprobs(result, output, self._requests)
        # A request cancelled while the worker ran has been reported as ended.
        admissions = [
            (request, admission)
            for request, admission in flight.admissions
            if request.key in self._requests and request.admission is None
        ]
        failures = flight.failures(result)
        ends = [self._end(facts, failures.get(facts.key, "")) for facts in output.finished]
        drafts = flight.draft_counts(output)
        num_tokens, is_dry = len(output.token_ids), not self._in_flight
        self.meter.got_result(flight, came_s, num_tokens, drafts, now, is_dry=is_dry)
        if len(output.keys) or ends or admissions:
            publish = partial(self._switchboard.publish, output, draft_counts=drafts)
            publish(ends=ends, admissions=admissions, logprobs=logprobs)
        self.num_steps += 1
        self._is_worth_planning = True
        self._last_progress_s = asyncio.get_running_loop().time()

    def _publish_ends(self, ended: Sequence[FinishedRequest]) -> None:
        """Publish the ends of requests that did not end by a result."""
        if ended:
            self._switchboard.publish(ends=[self._end(facts) for facts in ended])

    def _end(self, facts: FinishedRequest, message: str = "") -> RequestEnd:
        return RequestEnd(self._requests.pop(facts.key), facts, message)

    async def _wait(self) -> None:
        """Wait for a message, a result, or the time to plan again.

        Raises:
            WorkerLostError: the worker gave no result in time.
        """
        when = None
        if self._in_flight:
            when = self._last_progress_s + self._step_timeout_s
        elif self._core.has_unfinished or self._core.has_news:
            when = asyncio.get_running_loop().time() + _STUCK_RETRY_S
        try:
            async with asyncio.timeout_at(when):
                await self._wake.wait()
        except TimeoutError:
            if self._in_flight:
                raise WorkerLostError(f"no result in {self._step_timeout_s:g} s") from None
            self._is_worth_planning = True
