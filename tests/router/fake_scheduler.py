"""A scheduler that speaks the real protocol and generates what a script says.

It keeps no blocks and runs no model; everything else, the streams, the columns and the order of
messages, is as a scheduler does it.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
import numpy as np

from headrace.service.columns import pack_int32, pack_uint32, unpack_int32
from headrace.v1 import common_pb2, inference_pb2, scheduler_pb2, scheduler_pb2_grpc
from tests.router.fake_journal import FakeJournal

MODEL = "tiny"


def worker(**changes):
    values = {
        "worker_id": "worker-0",
        "incarnation": "one",
        "model": MODEL,
        "role": common_pb2.WORKER_ROLE_MIXED,
        "state": common_pb2.WORKER_STATE_READY,
        "max_model_len": 4096,
        "block_size": 16,
        "num_kv_blocks": 1024,
        "max_num_seqs": 256,
        "vocab_size": 100_000,
        "num_free_kv_blocks": 1024,
    }
    return common_pb2.Worker(**(values | changes))


@dataclass
class Script:
    """What a request generates, and how it ends if it is not ended before."""

    token_ids: Sequence[int]
    reason: int = common_pb2.FINISH_REASON_LENGTH
    stop_token_id: int | None = None
    message: str = ""
    # Drafts verified and accepted in each step.
    draft_counts: tuple[int, int] = (0, 0)


@dataclass
class Generation:
    submission: scheduler_pb2.Submission
    script: Script
    connection: "Connection"
    position: int = 0
    is_admitted: bool = False
    is_paused: bool = False

    @property
    def wants_logprobs(self):
        sampling = self.submission.sampling
        return sampling.HasField("logprobs") or sampling.HasField("prompt_logprobs")

    @property
    def prompt_token_ids(self):
        return unpack_int32(self.submission.prompt_token_ids, "prompt").tolist()

    @property
    def generated_token_ids(self):
        return unpack_int32(self.submission.generated_token_ids, "generated").tolist()


@dataclass(eq=False)
class Connection:
    outbox: asyncio.Queue = field(default_factory=asyncio.Queue)
    live: dict[int, Generation] = field(default_factory=dict)


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Each `step` gives every live request its next tokens; `is_paced` steps by itself."""

    def __init__(self, *, script: Callable | None = None, is_paced=True, interval_s=0.0):
        self.script = script or (lambda submission: Script([65] * submission.sampling.max_tokens))
        self.is_paced = is_paced
        self.interval_s = interval_s
        self.tokens_per_step = 1
        self.limit = 10**9  # no request gets further than this many tokens
        self.workers = [worker()]
        self.num_messages = 0  # over all connections, their hellos included
        self.submissions: list[scheduler_pb2.Submission] = []
        self.cancellations: list[tuple[str, int]] = []
        self.pauses: list[tuple[str, bool]] = []
        self.heeds_pauses = True
        self.heeds_cancellations = True
        self.refusals: list[tuple[str, ...]] = []  # what the next submissions get
        self.is_draining = False
        self.dies_of = lambda submission: False
        self.num_deaths = 0
        self.connections: list[Connection] = []
        # Whose router is gone, by request id; they go on, and end unseen.
        self.orphans: dict[str, Generation] = {}
        self.adopted: list[tuple[str, int]] = []  # ids, and the epochs under which they came
        self.asked_to_abort: list[str] = []
        self.journal: FakeJournal | None = None
        self.name = "fake"
        self.address = ""
        self._pool_changed = asyncio.Event()
        self._has_work = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._stepper: asyncio.Task | None = None

    async def start(self, address="127.0.0.1:0"):
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"127.0.0.1:{port}"
        await self._server.start()
        self._stepper = asyncio.create_task(self._run_steps())
        return self

    async def stop(self):
        self._stepper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._stepper
        await self._server.stop(0)

    async def __aenter__(self):
        return await self.start()

    async def __aexit__(self, *_):
        await self.stop()

    @property
    def live(self):
        return [g for c in self.connections for g in c.live.values()]

    def set_workers(self, *workers):
        self.workers = list(workers)
        self._pool_changed.set()

    def step(self, num_tokens=None):
        """One step for every live request, in one message per router."""
        for connection in self.connections:
            if connection.live:
                update = self._step(connection, num_tokens or self.tokens_per_step)
                connection.outbox.put_nowait(scheduler_pb2.SchedulerMessage(step_update=update))
        for request_id, generation in list(self.orphans.items()):
            if generation.wants_logprobs:
                continue
            begin = generation.position
            end = min(begin + (num_tokens or self.tokens_per_step), self.limit)
            new = list(generation.script.token_ids[begin:end])
            generation.position += len(new)
            if self.journal is not None and new:
                self.journal.add(generation, begin, new)
            if generation.position >= len(generation.script.token_ids):
                del self.orphans[request_id]
                if self.journal is not None:
                    self.journal.end(generation, generation.script.reason)

    def _step(self, connection, num_tokens, only=None):
        handles, counts, token_ids, draft_counts = [], [], [], []
        update = scheduler_pb2.StepUpdate()
        for handle, generation in list(connection.live.items()):
            script = generation.script
            if generation.is_paused or handle not in (only or connection.live):
                continue
            if not generation.is_admitted:
                generation.is_admitted = True
                update.admitted.add(
                    handle=handle,
                    num_cached_tokens=0,
                    time_unix_s=time.time(),
                    worker_id=generation.submission.worker_id,
                )
            end = min(generation.position + num_tokens, self.limit)
            new = list(script.token_ids[generation.position : end])
            generation.position += len(new)
            if new:
                handles.append(handle)
                counts.append(len(new))
                draft_counts.extend(script.draft_counts)
                token_ids.extend(new)
                self._add_logprobs(update, generation, new)
                self._write(generation, new, update)
            if generation.position >= len(script.token_ids):
                finished = update.finished.add(
                    handle=handle, reason=script.reason, message=script.message, num_preemptions=1
                )
                if script.stop_token_id is not None:
                    finished.stop_token_id = script.stop_token_id
                if self.journal is not None:
                    self.journal.end(generation, script.reason, script.stop_token_id)
                del connection.live[handle]
        update.handles = pack_uint32(np.array(handles, np.uint32))
        update.num_new_tokens = pack_int32(np.array(counts, np.int32))
        update.token_ids = pack_int32(np.array(token_ids, np.int32))
        if any(draft_counts):
            update.draft_counts = pack_int32(np.array(draft_counts, np.int32))
        return update

    def _write(self, generation, new, update):
        if self.journal is None:
            return
        entries = update.logprobs[-1:] if generation.wants_logprobs else []
        tokens = [token for entry in entries for token in entry.tokens]
        prompt_tokens = [token for entry in entries for token in entry.prompt_tokens]
        begin = generation.position - len(new)
        self.journal.add(generation, begin, new, tokens, prompt_tokens)

    def _add_logprobs(self, update, generation, new):
        sampling = generation.submission.sampling
        if not generation.wants_logprobs:
            return
        entry = update.logprobs.add(handle=generation.submission.handle)
        if sampling.HasField("logprobs"):
            begin = generation.position - len(new)
            for position, token_id in enumerate(new, begin):
                entry.tokens.add(token_id=token_id, logprob=-position / 16, rank=1)
        if sampling.HasField("prompt_logprobs") and generation.position == len(new):
            for token_id in generation.prompt_token_ids[1:]:
                entry.prompt_tokens.add(token_id=token_id, logprob=-1.5, rank=2)

    async def _run_steps(self):
        while True:
            await self._has_work.wait()
            has_work = self.orphans or any(c.live for c in self.connections)
            if not has_work or not self.is_paced:
                self._has_work.clear()
                continue
            self.step()
            await asyncio.sleep(self.interval_s)

    def break_connections(self):
        """The routers lose this scheduler, and what they had sent."""
        for connection in self.connections:
            connection.live.clear()
            connection.outbox.put_nowait(None)

    def resume(self):
        self.is_paced = True
        self._has_work.set()

    async def Connect(self, requests, context):
        connection = Connection()
        self.connections.append(connection)
        reader = asyncio.create_task(self._read(requests, connection))
        try:
            while (message := await connection.outbox.get()) is not None:
                yield message
        finally:
            reader.cancel()
            self.connections.remove(connection)
            for generation in connection.live.values():
                self.orphans[generation.submission.request_id] = generation

    async def _read(self, requests, connection):
        async for message in requests:
            self.num_messages += 1
            for submission in message.submissions:
                self._take(submission, connection)
            for pause in message.pauses:
                if (generation := connection.live.get(pause.handle)) is not None:
                    self.pauses.append((generation.submission.request_id, pause.paused))
                    generation.is_paused = pause.paused and self.heeds_pauses
            for cancellation in message.cancellations if self.heeds_cancellations else ():
                generation = connection.live.pop(cancellation.handle, None)
                if generation is not None:
                    if self.journal is not None:
                        is_stop = cancellation.reason == scheduler_pb2.CANCEL_REASON_STOP_STRING
                        reason = "STOP" if is_stop else "ABORTED"
                        self.journal.end(
                            generation, common_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
                        )
                    self.cancellations.append(
                        (generation.submission.request_id, cancellation.reason)
                    )
                    update = scheduler_pb2.StepUpdate()
                    update.finished.add(
                        handle=cancellation.handle, reason=common_pb2.FINISH_REASON_ABORTED
                    )
                    connection.outbox.put_nowait(scheduler_pb2.SchedulerMessage(step_update=update))

    def _take(self, submission, connection):
        self.submissions.append(submission)
        if self.dies_of(submission):
            self.num_deaths += 1
            connection.outbox.put_nowait(None)
        earlier = self._find(submission.request_id)
        lives = earlier is not None and earlier.submission.epoch >= submission.epoch
        if self.refusals or lives:
            reason, text, *field = (
                self.refusals.pop(0) if self.refusals else ("DUPLICATE", "it runs here")
            )
            message = scheduler_pb2.SchedulerMessage()
            message.refusals.add(
                handle=submission.handle,
                reason=scheduler_pb2.RefusalReason.Value(f"REFUSAL_REASON_{reason}"),
                message=text,
                field="".join(field),
            )
            connection.outbox.put_nowait(message)
            return
        generation = Generation(submission, self.script(submission), connection)
        generation.position = len(generation.generated_token_ids)
        connection.live[submission.handle] = generation
        if earlier is not None:
            self._move(earlier, generation)
        self._has_work.set()

    def _find(self, request_id):
        live = {g.submission.request_id: g for g in self.live}
        return live.get(request_id) or self.orphans.get(request_id)

    def _move(self, earlier, generation):
        """The earlier epoch ends; the later has its tokens at once, unless they must be made."""
        submission, old = generation.submission, earlier.submission
        if self.orphans.pop(old.request_id, None) is None:
            del earlier.connection.live[old.handle]
            earlier.connection.outbox.put_nowait(scheduler_pb2.SchedulerMessage(moved=[old.handle]))
        if generation.wants_logprobs:
            return
        self.adopted.append((submission.request_id, submission.epoch))
        if (num_tokens := earlier.position - generation.position) > 0:
            update = self._step(generation.connection, num_tokens, [submission.handle])
            generation.connection.outbox.put_nowait(
                scheduler_pb2.SchedulerMessage(step_update=update)
            )

    async def WatchPool(self, request, context):
        while True:
            self._pool_changed.clear()
            yield scheduler_pb2.PoolSnapshot(
                scheduler_id=self.name, workers=self.workers, draining=self.is_draining
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pool_changed.wait(), 1.0)

    async def Abort(self, request, context):
        response = inference_pb2.AbortResponse()
        for request_id in request.request_ids:
            self.asked_to_abort.append(request_id)
            ended = [g for g in (*self.live, *self.orphans.values()) if _is_of(g, request_id)]
            for generation in ended:
                self._end(generation)
            result = "ABORTED" if ended else "NOT_FOUND"
            response.outcomes.add(request_id=request_id, result=f"RESULT_{result}")
            for connection in self.connections:
                if not ended:
                    connection.outbox.put_nowait(
                        scheduler_pb2.SchedulerMessage(aborts=[request_id])
                    )
        return response

    def _end(self, generation):
        submission = generation.submission
        if self.journal is not None:
            self.journal.end(generation, common_pb2.FINISH_REASON_ABORTED)
        if self.orphans.pop(submission.request_id, None) is None:
            del generation.connection.live[submission.handle]
            update = scheduler_pb2.StepUpdate()
            update.finished.add(handle=submission.handle, reason=common_pb2.FINISH_REASON_ABORTED)
            generation.connection.outbox.put_nowait(
                scheduler_pb2.SchedulerMessage(step_update=update)
            )

    async def Audit(self, request, context):
        audits = [
            common_pb2.WorkerAudit(worker_id=w.worker_id, scheduler_id=self.name)
            for w in self.workers
        ]
        return inference_pb2.AuditPoolResponse(workers=audits)

    async def UpdateWorker(self, request, context):
        (found,) = (w for w in self.workers if w.worker_id == request.worker_id)
        if request.HasField("drained") and found.state != common_pb2.WORKER_STATE_LOST:
            state = "DRAINING" if request.drained else "READY"
            found.state = common_pb2.WorkerState.Value(f"WORKER_STATE_{state}")
        found.role = request.role or found.role
        self._pool_changed.set()
        return inference_pb2.UpdateWorkerResponse(worker=found)

    async def Explain(self, request, context):
        if not any(s.request_id == request.request_id for s in self.submissions):
            await context.abort(grpc.StatusCode.NOT_FOUND, "not here")
        return inference_pb2.ExplainResponse(request_id=request.request_id, cached_tokens=7)


def _is_of(generation, request_id):
    return generation.submission.request_id.partition("#")[0] == request_id
