"""A router without a model behind it: real gRPC, scripted answers.

What it does is in the prompt: "hang" streams one delta and waits, "flood" streams until the client
leaves, "refuse" and "full" are errors; anything else is echoed word by word. Run as a program it
prints its address.
"""

import asyncio
import os
import sys

from headrace.service.errors import exhausted, invalid, not_found, unimplemented
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc

MODEL = "fake"


class FakeInference(inference_pb2_grpc.InferenceServicer):
    """Keeps the requests it saw and the state of each."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.state_by_id: dict[str, str] = {}
        self.metadata: list[dict[str, str]] = []
        self.changed = asyncio.Condition()

    def _live_ids_of(self, tenant: str) -> list[str]:
        ids = [request.request_id for request in self.requests if request.tenant == tenant]
        return [request_id for request_id in ids if self.state_by_id[request_id] == "RUNNING"]

    async def wait_for_state(self, request_id: str, state: str) -> None:
        async with self.changed, asyncio.timeout(60):
            await self.changed.wait_for(lambda: self.state_by_id.get(request_id) == state)

    async def _set(self, request_id: str, state: str) -> None:
        async with self.changed:
            self.state_by_id[request_id] = state
            self.changed.notify_all()

    async def Generate(self, request, context):
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        if request.model not in {"", MODEL}:
            raise not_found("UNKNOWN_MODEL", f"no model {request.model!r}; served: {MODEL}")
        await self._set(request.request_id, "RUNNING")
        state = "ABORTED"
        try:
            async for response in self._answer(request):
                yield response
            state = "STOPPED"
        finally:
            await asyncio.shield(self._set(request.request_id, state))

    async def _answer(self, request):
        prompt = request.text or request.chat.messages[-1].content
        if "FAKE_NO_CHAT_TEMPLATE" in os.environ and not request.text:
            raise invalid("chat", "this model has no chat template; send `text` instead")
        if "refuse" in prompt:
            raise invalid("sampling.temperature", "must be >= 0, is -1")
        if "full" in prompt:
            raise exhausted("QUEUE_FULL", "the queue is full; try again", retry_after_s=2.0)
        words = prompt.split(" ")
        for i, word in enumerate(words):
            text = word if i == len(words) - 1 else word + " "
            output = inference_pb2.OutputDelta(text=text, token_ids=[i], first_token_position=i)
            if request.sampling.HasField("logprobs"):
                output.logprobs.add(
                    token_id=i, logprob=-0.5, rank=1, top_token_ids=[i, 9], top_logprobs=[-0.5, -2]
                )
            yield self._response(request, output)
            if word == "hang":
                await asyncio.Event().wait()
            while word == "flood":
                yield self._response(request, inference_pb2.OutputDelta(text="water " * 100))
        last = inference_pb2.OutputDelta(
            first_token_position=len(words), finish_reason=common_pb2.FINISH_REASON_STOP, stop="END"
        )
        response = self._response(request, last)
        response.usage.prompt_tokens = 7
        response.usage.completion_tokens = len(words)
        response.usage.cached_tokens = 3
        response.usage.draft_tokens = 5
        response.usage.accepted_draft_tokens = 4
        yield response

    @staticmethod
    def _response(request, output):
        return inference_pb2.GenerateResponse(request_id=request.request_id, outputs=[output])

    async def Resume(self, request, context):
        output = inference_pb2.OutputDelta(text="again", first_token_position=request.from_token)
        yield inference_pb2.GenerateResponse(request_id=request.request_id, outputs=[output])

    async def Abort(self, request, context):
        response = inference_pb2.AbortResponse()
        for request_id in request.request_ids or self._live_ids_of(request.tenant):
            state = self.state_by_id.get(request_id)
            result = "ABORTED" if state == "RUNNING" else "ALREADY_FINISHED"
            result = result if state else "NOT_FOUND"
            value = inference_pb2.AbortOutcome.Result.Value(f"RESULT_{result}")
            response.outcomes.add(request_id=request_id, result=value)
        return response

    async def GetStatus(self, request, context):
        if request.request_id not in self.state_by_id:
            raise not_found("UNKNOWN_REQUEST", f"nothing is known of {request.request_id}")
        response = inference_pb2.GetStatusResponse(
            request_id=request.request_id,
            state=self.state_by_id[request.request_id],
            epoch=1,
            model=MODEL,
            prompt_tokens=7,
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
            time_unix_s=1.5,
        )
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
        response = inference_pb2.GetPoolResponse(num_queued=2, num_in_flight=3, num_paused=1)
        response.workers.add(
            worker_id="w0",
            model=MODEL,
            state=common_pb2.WORKER_STATE_READY,
            device="cpu",
            num_kv_blocks=100,
            num_free_kv_blocks=40,
            num_running=2,
            max_num_seqs=8,
        )
        return response


async def start(config: ServingConfig | None = None) -> tuple[FakeInference, GrpcServer, str]:
    """A serving fake; the caller stops the server."""
    servicer = FakeInference()
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
