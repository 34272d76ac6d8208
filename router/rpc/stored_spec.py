"""What the store keeps of a request: written at its admission, read when it is taken up.

What the store gives is outside input. It is checked like a call, and an error says that the record
is corrupt.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from google.protobuf.message import DecodeError
from grpc import StatusCode

from headrace.service.columns import pack_int32, unpack_int32
from headrace.service.errors import ServiceError, invalid
from headrace.status.records import Stored, StoredCompletion
from headrace.status.states import State
from headrace.v1 import common_pb2, inference_pb2, record_pb2
from headrace.vocabulary import FinishReason
from router import outcomes
from router.outputs import CompletionFinish
from router.request import ClientRequest, Owner
from router.revival import Origin, Past
from router.rpc import wire
from router.text.tokenizer import ModelText

# A request with a larger spec is served, but not kept.
MAX_SPEC_BYTES = 4 * 1024 * 1024

_MAX_TOKENS = 2**31 - 1
_MAX_TRACEPARENT_CHARS = 128
# Of 64 words in each of their spellings, and 64 given as tokens.
_MAX_BAD_TOKEN_IDS = 1024

_REASON_BY_STATE = {
    State.STOPPED: FinishReason.STOP,
    State.LENGTH_CAPPED: FinishReason.LENGTH,
    State.REPETITION: FinishReason.REPETITION,
    State.ABORTED: FinishReason.ABORTED,
    State.DEADLINE: FinishReason.DEADLINE,
    State.EXPIRED: FinishReason.DEADLINE,
    State.ERROR: FinishReason.ERROR,
    State.REJECTED: FinishReason.ERROR,
}


def encode(request: ClientRequest) -> bytes | None:
    """A request as it was admitted; None if it is too large to be kept."""
    spec = request.spec
    assert isinstance(spec.sampling, common_pb2.SamplingParams), "the wire's own parameters"
    recovers = inference_pb2.GenerateRequest
    message = record_pb2.RequestSpec(
        request=inference_pb2.GenerateRequest(
            request_id=spec.request_id,
            model=spec.model,
            sampling=spec.sampling,
            priority=spec.priority,
            tenant=spec.tenant,
            cache_salt=spec.cache_salt,
            include_stop_str_in_output=spec.include_stop_str_in_output,
            echo=spec.echo,
            keep_special_tokens=spec.keep_special_tokens,
            keep_on_disconnect=spec.goes_on,
            recover=recovers.RECOVER_ALWAYS
            if spec.recovers_at_once
            else recovers.RECOVER_ON_RESUME,
        ),
        prompt_token_ids=pack_int32(request.prompt_token_ids),
        prompt_text=request.prompt_text,
        prompt_field=spec.prompt_field,
        body_sha256=spec.body_sha256,
        max_tokens=request.max_tokens,
        arrival_time_unix_s=request.arrived_unix_s,
        deadline_unix_s=spec.deadline_unix_s or 0.0,
        traceparent=spec.traceparent,
    )
    message.request.sampling.seed = spec.seed
    if spec.deadline_unix_s is not None and not spec.is_calls_deadline:
        message.request.deadline.FromNanoseconds(int(spec.deadline_unix_s * 1e9))
    return None if message.ByteSize() > MAX_SPEC_BYTES else message.SerializeToString()


def body_of(stored: Stored) -> bytes:
    """What tells whether a call repeats this request; empty for one that cannot be repeated."""
    try:
        return record_pb2.RequestSpec.FromString(stored.spec).body_sha256
    except DecodeError:
        return b""


def decode(stored: Stored, models: Mapping[str, ModelText]) -> Origin:
    """A stored request, with what is known of its completions.

    Raises:
        ServiceError: the request cannot be taken up; the reason says why.
    """
    if not stored.spec:
        raise outcomes.not_kept(stored.request_id)
    try:
        message = record_pb2.RequestSpec.FromString(stored.spec)
        name = wire.choose_model(message.request.model, models)
        return _origin(stored, message, name, models[name])
    except (DecodeError, UnicodeDecodeError) as error:
        raise _corrupt(stored, str(error)) from error
    except ServiceError as error:
        if error.code is not StatusCode.INVALID_ARGUMENT:
            raise
        raise _corrupt(stored, error.message) from error


def _origin(stored: Stored, message: record_pb2.RequestSpec, name: str, model: ModelText) -> Origin:
    request = message.request
    prompt = unpack_int32(message.prompt_token_ids, "prompt_token_ids")
    _check(bool(len(prompt)) and int(prompt.min()) >= 0, "prompt_token_ids")
    _check(request.request_id == stored.request_id, "request_id")
    _check(message.prompt_field in wire.PROMPT_FIELDS, "prompt_field")
    _check(len(message.traceparent) <= _MAX_TRACEPARENT_CHARS, "traceparent")
    _check(1 <= message.max_tokens <= _MAX_TOKENS, "max_tokens")
    times = (message.arrival_time_unix_s, message.deadline_unix_s)
    _check(all(math.isfinite(time) and time >= 0 for time in times), "times")
    wire.check_tenant(request.tenant)
    spec = wire.to_spec(
        request,
        wire.Bounds(_MAX_TOKENS, MAX_SPEC_BYTES, _MAX_BAD_TOKEN_IDS),
        request_id=wire.check_request_id(request.request_id),
        model=name,
        stop_by_token_id=wire.control_stops(request.sampling, model.tokenizer),
        default_max_tokens=None,
        deadline_unix_s=message.deadline_unix_s or None,
        traceparent=message.traceparent,
        body_sha256=message.body_sha256,
        prompt_field=message.prompt_field,
    )
    _check(len(stored.completions) == spec.n, "the number of completions")
    pasts = [_past(completion, message.max_tokens) for completion in stored.completions]
    _check_logprobs(stored.prompt_logprobs)
    pasts[0] = replace(pasts[0], prompt_logprobs=stored.prompt_logprobs)
    spec = replace(
        spec,
        deadline_unix_s=message.deadline_unix_s or None,
        is_calls_deadline=bool(message.deadline_unix_s) and not request.HasField("deadline"),
        wants_prompt_logprobs=spec.wants_prompt_logprobs and len(prompt) > 1,
    )
    failed = [c.record for c in stored.completions if c.record.state is State.ERROR]
    return Origin(
        spec=spec,
        prompt_token_ids=prompt,
        prompt_text=message.prompt_text,
        max_tokens=message.max_tokens,
        arrived_unix_s=message.arrival_time_unix_s,
        pasts=pasts,
        error=outcomes.failed(failed[0].detail) if failed else None,
    )


def _past(completion: StoredCompletion, max_tokens: int) -> Past:
    record = completion.record
    token_ids = array("i")
    token_ids.frombytes(unpack_int32(completion.token_ids, "tokens").astype(np.int32).tobytes())
    _check(len(token_ids) <= max_tokens and min(token_ids, default=0) >= 0, "tokens")
    _check(len(completion.logprobs) <= len(token_ids), "logprobs")
    _check_logprobs(completion.logprobs)
    return Past(
        epoch=max(1, record.epoch),
        token_ids=token_ids,
        logprobs=completion.logprobs,
        finish=_finish(completion),
        owner=Owner(record.scheduler_id, record.worker_id) if record.worker_id else None,
        num_cached_tokens=record.cached_tokens,
    )


def _finish(completion: StoredCompletion) -> CompletionFinish | None:
    record = completion.record
    reason = _REASON_BY_STATE.get(record.state)
    if reason is None:
        return None
    has_ended_well = reason in {FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION}
    if has_ended_well and not completion.is_complete:
        raise outcomes.tokens_lost(record.request_id)
    return CompletionFinish(reason, record.stop_token_id, message=record.detail)


def _check_logprobs(logprobs: Sequence[bytes]) -> None:
    for encoded in logprobs:
        common_pb2.TokenLogprobs.FromString(encoded)


def _check(is_right: bool, field: str) -> None:
    if not is_right:
        raise invalid(field, "is wrong")


def _corrupt(stored: Stored, why: str) -> ServiceError:
    return ServiceError(
        StatusCode.DATA_LOSS,
        "CORRUPT_RECORD",
        f"the record of {stored.request_id} cannot be read ({why}); send the request again",
    )
