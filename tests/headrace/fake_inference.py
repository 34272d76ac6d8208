"""A router without a model behind it: real gRPC, scripted answers.

What it does is in the prompt: "hang" streams one delta and waits, "flood" streams until the client
leaves, "gate" waits until the test opens the gate, "late" does so before its token, "refuse" and
"full" are errors; anything else is echoed word by word, one token each. Several fakes can share
their requests, as routers do through the store. Run as a program it prints its address.
"""

import asyncio
import os
import sys

from headrace.service.errors import (
    ServiceError,
    aborted,
    exhausted,
    invalid,
    not_found,
    unimplemented,
)
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from tests.headrace.waiting import until

MODEL = "fake"
# A flood goes on when its reader has read so far.
MAX_UNREAD = 100


class LiveRequest:
    """A request and all its answers, which a task adds while nobody or somebody reads."""

    def __init__(self, request):
        self.request = request
        self.responses = []
        self.num_read = 0
        self.state = "RUNNING"
        self.error = None
        self.num_readers = 0
        self.changed = asyncio.Condition()
        self.task = None

    async def change(self, **changes):
        async with self.changed:
            for name, value in changes.items():
                setattr(self, name, value)
            self.changed.notify_all()

    async def run(self, answer):
        try:
            async for response in answer:
                self.responses.append(response)
                await self.change()
                async with self.changed:
                    await self.changed.wait_for(
                        lambda: len(self.responses) - self.num_read < MAX_UNREAD
                    )
            await self.change(state="STOPPED")
        except ServiceError as error:
            await self.change(state="REJECTED", error=error)
        except asyncio.CancelledError:
            await asyncio.shield(self.change(state="ABORTED"))

    async def abort(self):
        self.task.cancel()
        await self.task

    async def read(self, positions):
        """The answers from the given positions on, then the error if there is one."""
        num_seen = 0
        while True:
            async with self.changed:
                while num_seen == len(self.responses) and self.state == "RUNNING":
                    await self.changed.wait()
            while num_seen < len(self.responses):
                response = self.responses[num_seen]
                num_seen += 1
                if (wanted := _from(response, positions)) is not None:
                    yield wanted
                await self.change(num_read=max(self.num_read, num_seen))
            if self.state != "RUNNING" and num_seen == len(self.responses):
                break
        if self.error is not None:
            raise self.error
        if self.state == "ABORTED":
            raise aborted("ABORTED", "the request was aborted")


def _from(response, positions):
    """The outputs of a response that are not before the positions."""
    wanted = [
        output
        for output in response.outputs
        if output.first_token_position >= positions[output.index]
    ]
    if not wanted:
        return None
    copy = inference_pb2.GenerateResponse()
    copy.CopyFrom(response)
    del copy.outputs[:]
    copy.outputs.extend(wanted)
    return copy


def _checked_prompt(request):
    if request.WhichOneof("prompt") == "token_ids":
        raise invalid("token_ids", "this fake reads text")
    prompt = request.text or request.chat.messages[-1].content
    if "FAKE_NO_CHAT_TEMPLATE" in os.environ and not request.text:
        raise invalid("chat", "this model has no chat template; send `text` instead")
    if "refuse" in prompt:
        raise invalid("sampling.temperature", "must be >= 0, is -1")
    if "full" in prompt:
        raise exhausted("QUEUE_FULL", "the queue is full; try again", retry_after_s=2.0)
    return prompt


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Keeps the calls it saw; live has the requests by id, which other fakes may share."""

    def __init__(self, live=None) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.resumed: list[inference_pb2.ResumeRequest] = []
        self.aborted: list[str] = []
        self.live: dict[str, LiveRequest] = {} if live is None else live
        self.metadata: list[dict[str, str]] = []
        self.gate = asyncio.Event()
        # Raised by the next calls, one each.
        self.errors: list[ServiceError] = []
        # A resumed stream begins so many tokens too late.
        self.resume_shift = 0
        self.num_pool_calls = 0
        self.worker = common_pb2.Worker(
            worker_id="w0",
            model=MODEL,
            state=common_pb2.WORKER_STATE_READY,
            device="cpu",
            num_kv_blocks=100,
            num_free_kv_blocks=40,
            num_running=2,
            max_num_seqs=8,
        )
        # Metric, bounds and counts of each.
        self.durations: list[tuple[str, tuple[float, ...], tuple[int, ...]]] = []
        # Of worker w1's ledger.
        self.faults: list[str] = []
        self.orphan_ttl_s = float(os.environ.get("FAKE_ORPHAN_TTL_S", "60"))

    def _live_ids_of(self, tenant: str) -> list[str]:
        return [
            request_id
            for request_id, live in self.live.items()
            if live.request.tenant == tenant and live.state == "RUNNING"
        ]

    async def wait_for_state(self, request_id: str, state: str) -> None:
        await until(lambda: request_id in self.live and self.live[request_id].state == state)

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.errors:
            raise self.errors.pop(0)
        if request.model not in {"", MODEL}:
            raise not_found("UNKNOWN_MODEL", f"no model {request.model!r}; served: {MODEL}")
        positions = list(request.from_token_by_index) or [0] * (request.sampling.n or 1)
        body = inference_pb2.GenerateRequest()
        body.CopyFrom(request)
        body.ClearField("from_token_by_index")
        live = self.live.get(request.request_id)
        if live is None or live.request != body:
            live = self.live[request.request_id] = LiveRequest(body)
            live.task = asyncio.create_task(live.run(self._answer(body)))
        async for response in self._read(live, positions):
            yield response

    async def Resume(self, request, context):
        self.resumed.append(request)
        if self.errors:
            raise self.errors.pop(0)
        if (live := self.live.get(request.request_id)) is None:
            raise not_found("UNKNOWN_REQUEST", f"nothing is known of {request.request_id}")
        num_open = (live.request.sampling.n or 1) - len(request.from_token_by_index)
        positions = [*request.from_token_by_index, *[request.from_token] * num_open]
        async for response in self._read(live, [p + self.resume_shift for p in positions]):
            yield response

    async def _read(self, live, positions):
        live.num_readers += 1
        is_over = False
        try:
            async for response in live.read(positions):
                yield response
            is_over = True
        except ServiceError:
            is_over = True
            raise
        finally:
            live.num_readers -= 1
            if not is_over and not live.request.keep_on_disconnect:
                await asyncio.shield(live.abort())
            elif not is_over:
                live.orphaned = asyncio.create_task(self._end_orphan(live))

    async def _end_orphan(self, live):
        await asyncio.sleep(self.orphan_ttl_s)
        if not live.num_readers:
            await live.abort()

    async def _answer(self, request):
        prompt = _checked_prompt(request)
        words = prompt.split(" ")
        completions = range(request.sampling.n or 1)
        if request.echo:
            yield self._response(request, inference_pb2.OutputDelta(text="> "))
        for i, word in enumerate(words):
            text = word if i == len(words) - 1 else word + " "
            if word == "late":
                await self.gate.wait()
            for index in completions:
                yield self._response(request, self._output(request, index, i, text))
                if word == "gate" and index == 0:
                    await self.gate.wait()
            if word == "hang":
                await asyncio.Event().wait()
            while word == "flood":
                yield self._response(request, inference_pb2.OutputDelta(text="water " * 100))
        for index in completions:
            last = inference_pb2.OutputDelta(
                index=index,
                first_token_position=len(words),
                finish_reason=common_pb2.FINISH_REASON_STOP,
                stop="END",
            )
            response = self._response(request, last)
            if index == completions[-1]:
                response.usage.prompt_tokens = 7
                response.usage.completion_tokens = len(words)
                response.usage.cached_tokens = 3
                response.usage.draft_tokens = 5
                response.usage.accepted_draft_tokens = 4
            yield response

    @staticmethod
    def _output(request, index, i, text):
        output = inference_pb2.OutputDelta(
            index=index, text=text, token_ids=[i], first_token_position=i
        )
        if request.sampling.HasField("logprobs"):
            output.logprobs.add(
                token_id=i, logprob=-0.5, rank=1, top_token_ids=[i, 9], top_logprobs=[-0.5, -2]
            )
        return output

    @staticmethod
    def _response(request, output):
        return inference_pb2.GenerateResponse(request_id=request.request_id, outputs=[output])

    async def Abort(self, request, context):
        response = inference_pb2.AbortResponse()
        for request_id in request.request_ids or self._live_ids_of(request.tenant):
            self.aborted.append(request_id)
            live = self.live.get(request_id)
            result = "NOT_FOUND" if live is None else "ALREADY_FINISHED"
            if live is not None and live.state == "RUNNING":
                await live.abort()
                result = "ABORTED"
            value = inference_pb2.AbortOutcome.Result.Value(f"RESULT_{result}")
            response.outcomes.add(request_id=request_id, result=value)
        return response

    async def GetStatus(self, request, context):
        if request.request_id not in self.live:
            raise not_found("UNKNOWN_REQUEST", f"nothing is known of {request.request_id}")
        response = inference_pb2.GetStatusResponse(
            request_id=request.request_id,
            state=self.live[request.request_id].state,
            epoch=1,
            model=MODEL,
            prompt_tokens=7,
            router_id="r0",
            scheduler_id="s0",
        )
        response.create_time.FromMilliseconds(1_700_000_000_500)
        response.update_time.FromMilliseconds(1_700_000_001_500)
        return response

    async def Explain(self, request, context):
        if request.request_id == "later":
            raise unimplemented("NOT_YET", "Explain comes with a later version")
        response = inference_pb2.ExplainResponse(
            request_id=request.request_id, num_preemptions=1, recomputed_tokens=12, cached_tokens=16
        )
        response.events.add(kind="ADDED", first_step=3, last_step=3)
        response.events.add(
            kind="WAITED",
            first_step=3,
            last_step=5,
            detail="waited for 3 steps: needs 12 KV blocks, 7 free",
            queue_position=0,
            time_unix_s=1.0005,
            duration_s=0.002,
        )
        response.begin_time_unix_s = 1.0
        response.total_s = 0.01
        response.breakdown.add(stage="QUEUE", seconds=0.006)
        response.breakdown.add(stage="WAIT", cause="BLOCKS", seconds=0.004)
        response.queued_with.add(num_requests=2, num_tokens=20)
        response.queued_with.add(tenant="b", num_requests=1, num_tokens=30)
        response.steps_waited_by_cause["KV_BLOCKS"] = 3
        return response

    async def ListModels(self, request, context):
        response = inference_pb2.ListModelsResponse()
        ready = int(os.environ.get("FAKE_READY_WORKERS", "1"))
        response.models.add(
            name=MODEL,
            max_model_len=2048,
            vocab_size=100,
            num_ready_workers=ready,
            has_chat_template="FAKE_NO_CHAT_TEMPLATE" not in os.environ,
            default_sampling={"temperature": 0.2, "top_k": 7},
            default_chat_max_tokens=1024,
        )
        return response

    async def GetPool(self, request, context):
        self.num_pool_calls += 1
        return inference_pb2.GetPoolResponse(
            num_queued=2,
            num_in_flight=3,
            num_paused=1,
            workers=[self.worker],
            durations=[
                inference_pb2.DurationCounts(metric=metric, bounds_s=bounds_s, counts=counts)
                for metric, bounds_s, counts in self.durations
            ],
        )

    async def UpdateWorker(self, request, context):
        if request.worker_id != self.worker.worker_id:
            raise not_found("UNKNOWN_WORKER", f"there is no worker {request.worker_id!r}")
        if request.HasField("drained"):
            state = "DRAINING" if request.drained else "READY"
            self.worker.state = common_pb2.WorkerState.Value(f"WORKER_STATE_{state}")
        self.worker.role = request.role or self.worker.role
        return inference_pb2.UpdateWorkerResponse(worker=self.worker)

    async def AuditPool(self, request, context):
        response = inference_pb2.AuditPoolResponse()
        for worker_id, faults in (("w0", ()), ("w1", self.faults)):
            response.workers.add(
                worker_id=worker_id,
                scheduler_id="s0",
                num_kv_blocks=100,
                num_free_blocks=70,
                num_cached_blocks=20,
                num_owned_blocks=10,
                num_requests=2,
                num_compared_rows=None if worker_id == "w0" else 3,
                faults=faults,
            )
        return response


async def start(
    config: ServingConfig | None = None, live: dict[str, LiveRequest] | None = None
) -> tuple[FakeInference, GrpcServer, str]:
    """A serving fake; the caller stops the server."""
    servicer = FakeInference(live)
    server = GrpcServer(config or ServingConfig(), ["headrace.v1.Inference"])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    address = await server.start()
    server.set_serving(True)
    return servicer, server, address


async def _main() -> None:
    _, server, address = await start()
    print(address, flush=True)
    # Ends with its parent: the other end of stdin closes.
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_main())
