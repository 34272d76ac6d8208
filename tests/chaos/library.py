"""A client that is `HeadraceClient`, which resumes by itself; what it gives is checked the same."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc

from headrace.client import HeadraceClient, ResumePolicy
from headrace.service.errors import ServiceError
from headrace.service.protocol import FINISH_REASON
from headrace.types import Delta, Sampling
from headrace.v1 import inference_pb2
from tests.chaos.reader import FailedError
from tests.chaos.received import Received
from tests.chaos.tally import Tally


async def read(
    received: Received,
    addresses: Iterable[str],
    tally: Tally,
    *,
    policy: ResumePolicy | None = None,
    recover_always: bool = False,
) -> None:
    """Reads a request to its end.

    Raises:
        FailedError: the client gave up.
    """
    request = received.wanted.request
    prompt: Any = request.text or list(request.token_ids.ids)
    async with HeadraceClient(",".join(addresses), resume=policy) as client:
        while True:
            deltas = client.generate(
                prompt,
                sampling=to_sampling(request),
                request_id=request.request_id,
                priority=request.priority,
                tenant=request.tenant,
                include_stop_str_in_output=request.include_stop_str_in_output,
                recover_always=recover_always,
            )
            try:
                async for delta in deltas:
                    received.take(to_response(delta))
                    tally.progressed(request.request_id)
                tally.events["resumes by HeadraceClient"] += delta.num_resumes
                return
            except ServiceError as error:
                tally.events[f"HeadraceClient: {error.reason}"] += 1
                # Refused at the door: nothing is running yet.
                if received.is_begun or error.code is not grpc.StatusCode.UNAVAILABLE:
                    raise FailedError(error) from error
                await asyncio.sleep(error.retry_after_s or 0.1)


def to_sampling(request: inference_pb2.GenerateRequest) -> Sampling:
    given = {field.name: value for field, value in request.sampling.ListFields()}
    # A number that is set to its default is not listed.
    given["temperature"] = request.sampling.temperature
    if request.sampling.HasField("logprobs"):
        given["logprobs"] = request.sampling.logprobs
    return Sampling(**{**given, "stop": list(request.sampling.stop)})


def to_response(delta: Delta) -> inference_pb2.GenerateResponse:
    """The message that a delta came from."""
    output = inference_pb2.OutputDelta(
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        first_token_position=delta.first_token_position,
    )
    for one in delta.logprobs:
        output.logprobs.add(
            token_id=one.token_id,
            logprob=one.logprob,
            rank=one.rank,
            top_token_ids=[token_id for token_id, _ in one.top],
            top_logprobs=[logprob for _, logprob in one.top],
        )
    if delta.finish_reason is not None:
        output.finish_reason = FINISH_REASON.number(delta.finish_reason)
    if isinstance(delta.matched_stop, str):
        output.stop = delta.matched_stop
    return inference_pb2.GenerateResponse(request_id=delta.request_id, outputs=[output])
