"""Drives one incarnation of one gpuworker, step by step.

The loop owns the scheduling core and all that belongs to a step; others send it messages.
Decisions are made synchronously, between two awaits; only the edges wait. It lives as long as the
worker's stream: when that breaks, `take_requests` hands over what was not finished.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.service import telemetry
from scheduler import intake
from scheduler.core.explain import Explanation
from scheduler.core.plan import (
    Admission,
    FinishedRequest,
    Int32Array,
    Int64Array,
    NewRequest,
    RequestStatus,
    StepPlan,
)
from scheduler.core.recording import Recorder
from scheduler.core.scheduler import SchedulerCore
from scheduler.in_flight import InFlight
from scheduler.recording import Recording
from scheduler.requests import LiveRequest, Submission
from scheduler.switchboard import Finish, Start, StepNews, Switchboard
from scheduler.worker import (
    Draining,
    WorkerDrainedError,
    WorkerInfo,
    WorkerLostError,
    WorkerResult,
    WorkerStream,
)

# How often a loop that has requests, but nothing to run, looks again (deadlines, pauses, rows that
# the worker may forget).
_STUCK_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class Cancel:
    """A message to the loop: end a request."""

    request: LiveRequest
    status: RequestStatus


@dataclass(frozen=True, slots=True)
class Pausing:
    """A message to the loop: set a request aside or go on with it, as its is_paused says then."""

    request: LiveRequest


Message = LiveRequest | Cancel | Pausing


class Engine:
    """The loop of one worker incarnation. `submit`, `cancel`, `set_paused` are messages to it."""

    def __init__(
        self,
        core: SchedulerCore,
        stream: WorkerStream,
        info: WorkerInfo,
        *,
        switchboard: Switchboard,
        clock: Callable[[], float],
        pipeline_depth: int,
        step_timeout_s: float,
        hashes_ahead: bool = True,
        recording: Recording | None = None,
    ) -> None:
        """The engine closes the stream in the end.

        Args:
            core: decides; nobody else may touch it.
            stream: a new stream of the worker.
            info: what the worker is.
            switchboard: where news of requests goes.
            clock: seconds since the epoch.
            pipeline_depth: plans that may be without a result; as the core was told.
            step_timeout_s: a worker that gives no result for so long is lost.
            hashes_ahead: hash long prompts between steps, for the prefix cache.
            recording: what the core does is written there; the engine closes it.
        """
        self._core = core
        self._recording = recording
        # Who decides: the core, or what stands before it and writes down.
        self._driver: SchedulerCore | Recorder = recording.recorder if recording else core
        self._stream = stream
        self._info = info
        self._switchboard = switchboard
        self._journal = switchboard.journal
        self._clock = clock
        self._pipeline_depth = pipeline_depth
        self._step_timeout_s = step_timeout_s
        self._hashes_ahead = hashes_ahead

        self._requests: dict[int, LiveRequest] = {}
        self._inbox: deque[Message] = deque()
        # Long prompts on their way to the core, oldest first.
        self._unhashed: dict[int, NewRequest] = {}
        self._results: deque[WorkerResult] = deque()
        self._in_flight: deque[InFlight] = deque()
        self._key_by_row: Int64Array = np.zeros(info.max_num_seqs, dtype=np.int64)
        self._wake = asyncio.Event()
        # False once a plan came out empty, until something changes.
        self._is_worth_planning = True
        self._last_progress_s = 0.0
        self.num_steps = 0
        # The worker said that it is shutting down: it gets no new requests.
        self.is_draining = False

    @property
    def info(self) -> WorkerInfo:
        return self._info

    @property
    def num_requests(self) -> int:
        """Requests it has, those on their way in included."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return self._core.num_running

    @property
    def num_paused(self) -> int:
        return self._core.num_paused

    @property
    def num_free_blocks(self) -> int:
        return self._core.num_free_blocks

    def refusal(self, num_prompt_tokens: int, max_tokens: int) -> str | None:
        """Why such a request can never be served here, or None."""
        return self._core.refusal(num_prompt_tokens, max_tokens)

    def end_reached(self, submission: Submission, generated: Int32Array) -> RequestStatus | None:
        """How a request has ended with its last token. See intake.end_reached."""
        return intake.end_reached(submission, generated, self._info)

    def explain(self, request_id: str) -> Explanation | None:
        """What happened to a request here and why, or None."""
        return self._core.explain(request_id)

    def submit(self, request: LiveRequest) -> None:
        """Take a request; it must be one that `refusal` lets pass."""
        request.home = self
        self._requests[request.key] = request
        self._journal.submitted(request, self._info.worker_id)
        self._tell(request)

    def cancel(self, request: LiveRequest, status: RequestStatus) -> None:
        """End a request before the next step; nothing happens if it has ended."""
        self._tell(Cancel(request, status))

    def set_paused(self, request: LiveRequest, *, is_paused: bool) -> None:
        """Set a request aside before the next step, or go on with it."""
        request.is_paused = is_paused
        self._tell(Pausing(request))

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
            if self._recording is not None:
                self._recording.close()

    def take_requests(self) -> list[LiveRequest]:
        """What was not finished when `run` ended, oldest first, with the tokens generated so far.

        A request that was in a step without a result counts a loss: it may be what killed the
        worker.
        """
        suspects = {int(key) for flight in self._in_flight for key in flight.keys}
        cancelled = [message for message in self._inbox if isinstance(message, Cancel)]
        not_in_core = {m.key for m in self._inbox if isinstance(m, LiveRequest)} | set(
            self._unhashed
        )
        self._inbox.clear()
        finished = [
            self._finish(intake.unscheduled_end(message.request, message.status))
            for message in cancelled
            if message.request.key in self._requests
        ]
        if finished:
            self._switchboard.publish(StepNews(finished=finished))
        for request in self._requests.values():
            if request.key not in not_in_core:
                request.generated_token_ids = self._core.output_token_ids(request.key)
            request.num_losses += request.key in suspects
        taken = list(self._requests.values())
        self._requests.clear()
        return taken

    def _tell(self, message: Message) -> None:
        self._inbox.append(message)
        self._wake.set()

    async def _receive_results(self) -> None:
        while True:
            match await self._stream.receive():
                case Draining():
                    self.is_draining = True
                    self._switchboard.bell.ring()
                case result:
                    self._results.append(result)
            self._wake.set()

    async def _step_for_ever(self) -> None:
        while True:
            self._wake.clear()
            self._read_inbox()
            while self._results:
                self._apply_result(self._results.popleft())
            if self.is_draining and not self._requests:
                raise WorkerDrainedError("it has finished what it had")
            while self._is_worth_planning and len(self._in_flight) < self._pipeline_depth:
                await self._plan_step()
            if self._unhashed:
                self._hash_slice()
                await asyncio.sleep(0)
            else:
                await self._wait()

    def _read_inbox(self) -> None:
        finished = []
        while self._inbox:
            self._is_worth_planning = True
            match self._inbox.popleft():
                case Cancel(request, status):
                    if (facts := self._abort(request, status)) is not None:
                        finished.append(self._finish(facts))
                case Pausing(request):
                    self._pause_or_continue(request)
                case request:
                    if (facts := self._add(request)) is not None:
                        finished.append(self._finish(facts))
        if finished:
            self._switchboard.publish(StepNews(finished=finished))

    def _abort(self, request: LiveRequest, status: RequestStatus) -> FinishedRequest | None:
        """How it ended just now; None if it had ended."""
        if self._unhashed.pop(request.key, None) is not None:
            return intake.unscheduled_end(request, status)
        return self._driver.abort(request.key, status)

    def _add(self, request: LiveRequest) -> FinishedRequest | None:
        """Give it to the core; how it ended if there is nothing left to do."""
        end = self.end_reached(request.submission, request.generated_token_ids)
        if end is not None:
            self._journal.admitted(request, 0, self._info.worker_id)
            return intake.unscheduled_end(request, end)
        new_request = intake.new_request(request, self._info, hashes_ahead=self._hashes_ahead)
        if new_request.block_hashes is None:
            self._give_to_core(new_request)
        else:
            self._unhashed[request.key] = new_request
        return None

    def _give_to_core(self, new_request: NewRequest) -> None:
        self._driver.add_request(new_request, self._clock())
        if (request := self._requests[new_request.key]).is_paused:
            self._pause_or_continue(request)

    def _pause_or_continue(self, request: LiveRequest) -> None:
        """Bring the core to what is wanted; it knows no request that has ended or is not hashed."""
        if not request.is_paused:
            self._driver.continue_request(request.key)
        elif self._driver.pause_request(request.key):
            self._journal.paused(request)
            # What it held is free, whether or not there is anything else to run.
            self._switchboard.bell.ring()

    def _hash_slice(self) -> None:
        """Hash a little of the oldest long prompt; once done, the core has it."""
        key, new_request = next(iter(self._unhashed.items()))
        assert new_request.block_hashes is not None, "only such requests wait for it"
        if new_request.block_hashes.advance(new_request.prompt_token_ids):
            del self._unhashed[key]
            self._give_to_core(new_request)
            self._is_worth_planning = True

    async def _plan_step(self) -> None:
        plan = self._driver.schedule(self._clock())
        if plan.expired:
            expired = [self._finish(facts) for facts in plan.expired]
            self._switchboard.publish(StepNews(finished=expired))
        for key in plan.preempted_keys:
            self._journal.preempted(self._requests[key])
        started = self._note_admissions(plan.admissions) if plan.admissions else ()
        if not plan.is_worth_sending:
            self._is_worth_planning = False
            return
        placed = self._place(plan)
        span = self._journal.begin_step(plan, placed) if placed else None
        if not self._in_flight:
            self._last_progress_s = asyncio.get_running_loop().time()
        self._in_flight.append(InFlight(plan, self._key_by_row[plan.rows], started, span))
        self._switchboard.bell.ring()
        await self._stream.send(
            plan,
            [request.submission.sampling for request in placed],
            telemetry.traceparent_of(span) if span is not None else "",
        )

    def _place(self, plan: StepPlan) -> list[LiveRequest]:
        """Note who has which row from now on; returns them in the order of row_requests."""
        placed = []
        for row_request in plan.row_requests:
            self._key_by_row[row_request.row] = row_request.key
            request = self._requests[row_request.key]
            # It starts from its first token again, and so do its prompt's log probabilities.
            request.prompt_logprobs.clear()
            placed.append(request)
        return placed

    def _note_admissions(self, admissions: Sequence[Admission]) -> tuple[Start, ...]:
        started = []
        for admission in admissions:
            request = self._requests[admission.key]
            self._journal.admitted(request, admission.num_cached_tokens, self._info.worker_id)
            if not request.is_admitted:
                request.is_admitted = True
                started.append(
                    Start(
                        request,
                        admission.num_cached_tokens,
                        self._clock(),
                        self._info.worker_id,
                    )
                )
        return tuple(started)

    def _apply_result(self, result: WorkerResult) -> None:
        if not self._in_flight:
            raise WorkerLostError("it sent a result that no plan asked for")
        flight = self._in_flight.popleft()
        flight.check(result, self._info.num_spec_tokens)
        if flight.span is not None:
            flight.span.end()
        output = self._driver.update(result.step, self._clock())
        details = flight.token_details(result, output, self._requests)
        # A request cancelled while the worker ran has been reported as ended.
        started = [start for start in flight.started if start.request.key in self._requests]
        failures = flight.failures(result)
        finished = [self._finish(facts, failures.get(facts.key, "")) for facts in output.finished]
        if len(output.keys) or finished or started:
            self._switchboard.publish(
                StepNews(
                    keys=output.keys,
                    num_new_tokens=output.num_new_tokens,
                    token_ids=output.token_ids,
                    draft_counts=flight.draft_counts(result, output),
                    finished=finished,
                    started=started,
                    details=details,
                )
            )
        if self._recording is not None and self._recording.has_failed:
            self._driver = self._core
        self.num_steps += 1
        self._is_worth_planning = True
        self._last_progress_s = asyncio.get_running_loop().time()

    def _finish(self, facts: FinishedRequest, message: str = "") -> Finish:
        return Finish(self._requests.pop(facts.key), facts, message)

    async def _wait(self) -> None:
        """Until something happened; a worker that gives no result in time is lost."""
        when = None
        if self._in_flight:
            when = self._last_progress_s + self._step_timeout_s
        elif self._core.has_unfinished or self._core.has_freed_rows:
            when = asyncio.get_running_loop().time() + _STUCK_RETRY_S
        try:
            async with asyncio.timeout_at(when):
                await self._wake.wait()
        except TimeoutError:
            if self._in_flight:
                raise WorkerLostError(f"no result in {self._step_timeout_s:g} s") from None
            self._is_worth_planning = True
