"""Requests for a real model, whose answers are what the cluster gives before it is disturbed."""

from collections.abc import Callable
from random import Random

import grpc.aio

from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos.wanted import Answer, Wanted

_PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by a river,",
    "Water boils at",
    "def fibonacci(n):",
)
_BEHAVIOURS = ("read", "read", "leave", "rival", "reread", "repeat", "library")


async def prepare(address: str) -> Callable[[Random, str], Wanted]:
    """Asks each prompt twice, greedy and drawn; the function draws from these requests."""
    known: list[Wanted] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for number, text in enumerate(_PROMPTS):
            for temperature in (0.0, 1.0):
                request = inference_pb2.GenerateRequest(text=text, keep_on_disconnect=True)
                request.sampling.max_tokens = 40
                request.sampling.temperature = temperature
                request.sampling.seed = number
                request.sampling.n = 1
                known.append(Wanted(request, "read", [await _answer(stub, request)]))

    def draw(rng: Random, request_id: str) -> Wanted:
        wanted, request = rng.choice(known), inference_pb2.GenerateRequest()
        request.CopyFrom(wanted.request)
        request.request_id = request_id
        return Wanted(request, rng.choice(_BEHAVIOURS), wanted.answers)

    return draw


async def _answer(
    stub: inference_pb2_grpc.InferenceStub, request: inference_pb2.GenerateRequest
) -> Answer:
    token_ids: list[int] = []
    text, reason = "", 0
    async for response in stub.Generate(request):
        for output in response.outputs:
            token_ids += output.token_ids
            text += output.text
            reason = output.finish_reason
    return Answer(token_ids, text, reason)
