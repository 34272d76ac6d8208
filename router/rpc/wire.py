"""GenerateRequest to the router's own types, checked field by field, and replies back.

Everything from outside is validated here; the rules for sampling that schedulers check too are in
`headrace.service.sampling`. An error names the field as the proto does, and says what it must be.
"""

import functools
import hashlib
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from grpc import StatusCode

from headrace.service.errors import ServiceError, invalid, unimplemented
from headrace.service.protocol import FINISH_REASON
from headrace.service.sampling import check_values, refuse
from headrace.v1 import common_pb2, inference_pb2
from headrace.vocabulary import FinishReason
from router.prompts import ChatPrompt, CheckedPrompt, TextPrompt, TokenPrompt
from router.request import Int32Array, Spec
from router.revival import FirstTokens, Origin
from router.stream import CompletionDelta, Reply
from router.text.tokenizer import TextTokenizer

# The tenant is part of the ids of requests that are made with its keys (see `access`).
_REQUEST_ID = re.compile(r"([A-Za-z0-9._-]{1,64}/)?[A-Za-z0-9._:-]{1,128}")
_MAX_TENANT_CHARS = 64
_MAX_SALT_BYTES = 128
_MAX_MESSAGES = 2_048
_MAX_ROLE_BYTES = 64
_MAX_BYTES_PER_CHAR = 4  # UTF-8's
_MAX_STOP = 16
_MAX_STOP_BYTES = 256
_MAX_STOP_TOKEN_IDS = 64
_MAX_BAD_WORDS = 64
_MAX_BAD_WORD_BYTES = 256
_MAX_BAD_WORD_TOKENS = 256

_SERVED_FORMATS = (
    inference_pb2.ResponseFormat.TYPE_UNSPECIFIED,
    inference_pb2.ResponseFormat.TYPE_TEXT,
)
_RECOVERIES = frozenset(inference_pb2.GenerateRequest.Recover.values())


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds that a request is checked against: token ids are in [0, vocab_size)."""

    vocab_size: int
    max_prompt_bytes: int
    max_bad_token_ids: int = _MAX_BAD_WORDS


def choose_model(name: str, models: Collection[str]) -> str:
    """The model that a request names; an empty name means the only model."""
    if name in models:
        return name
    if not name and len(models) == 1:
        return next(iter(models))
    served = ", ".join(sorted(models)) or "none"
    if not name:
        raise invalid("model", f"must be given, as several are served: {served}")
    raise ServiceError(
        StatusCode.NOT_FOUND,
        "UNKNOWN_MODEL",
        f"model: {name!r} is not served here; served: {served}",
        field="model",
    )


def check_request_id(request_id: str, field: str = "request_id") -> str:
    """The id, if it is valid."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise invalid(field, "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
    return request_id


def check_tenant(tenant: str) -> None:
    """Raise if the tenant's name is too long."""
    if len(tenant) > _MAX_TENANT_CHARS:
        raise invalid("tenant", f"must have at most {_MAX_TENANT_CHARS} characters")


def request_id_of(request: inference_pb2.GenerateRequest) -> str:
    """The caller's id, if it is valid; a new one for a request without one."""
    given = request.request_id
    return check_request_id(given) if given else secrets.token_hex(16)


def to_spec(
    request: inference_pb2.GenerateRequest,
    bounds: Bounds,
    *,
    request_id: str,
    model: str,
    stop_by_token_id: Mapping[int, str],
    default_max_tokens: int | None,
    deadline_unix_s: float | None,
    traceparent: str,
    body_sha256: bytes = b"",
    prompt_field: str = "",
) -> Spec:
    """All but the prompt; of deadline_unix_s (the call's) and the request's, the earlier wins."""
    # A copy: a message in another keeps all of that in memory.
    sampling = common_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)
    check_sampling(sampling, bounds)
    if len(request.cache_salt.encode()) > _MAX_SALT_BYTES:
        raise invalid("cache_salt", f"must have at most {_MAX_SALT_BYTES} bytes")
    if request.response_format.type not in _SERVED_FORMATS:
        raise unimplemented(
            "RESPONSE_FORMAT", "response_format.type: only TYPE_TEXT is served; leave it out"
        )
    if request.recover not in _RECOVERIES:
        raise invalid("recover", "must be RECOVER_ON_RESUME or RECOVER_ALWAYS")
    deadlines = [d for d in (deadline_unix_s, _deadline(request)) if d is not None]
    deadline = min(deadlines, default=None)
    return Spec(
        request_id=request_id,
        model=model,
        sampling=sampling,
        n=sampling.n if sampling.HasField("n") else 1,
        seed=sampling.seed if sampling.HasField("seed") else secrets.randbits(63),
        prompt_field=prompt_field
        or _PROMPT_FIELD.get(request.WhichOneof("prompt") or "", "prompt"),
        max_tokens=sampling.max_tokens if sampling.HasField("max_tokens") else None,
        default_max_tokens=default_max_tokens,
        min_tokens=sampling.min_tokens,
        stop=tuple(sampling.stop),
        stop_by_token_id=stop_by_token_id,
        num_logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        include_stop_str_in_output=request.include_stop_str_in_output,
        echo=request.echo,
        keep_special_tokens=request.keep_special_tokens,
        priority=request.priority,
        tenant=request.tenant,
        cache_salt=request.cache_salt,
        deadline_unix_s=deadline,
        is_calls_deadline=deadline is not None and deadline == deadline_unix_s,
        traceparent=traceparent,
        wants_prompt_logprobs=sampling.HasField("prompt_logprobs"),
        body_sha256=body_sha256,
        goes_on=request.keep_on_disconnect,
        recovers_at_once=request.recover == inference_pb2.GenerateRequest.RECOVER_ALWAYS,
    )


def body_of(request: inference_pb2.GenerateRequest) -> bytes:
    """What tells whether a call repeats an earlier call: equal for equal messages.

    Empty for a call that leaves the id to the router, which cannot be repeated.
    """
    if not request.request_id:
        return b""
    return hashlib.sha256(request.SerializeToString(deterministic=True)).digest()


def take_first_tokens(request: inference_pb2.GenerateRequest) -> FirstTokens:
    """Take from_token_by_index out of a request: a repeated call may go on from other tokens.

    Raises if a call goes on from a token of an output that nothing fixes.
    """
    by_index = list(request.from_token_by_index)
    if by_index and not request.sampling.HasField("seed"):
        raise invalid("sampling.seed", "must be set with from_token_by_index")
    request.ClearField("from_token_by_index")
    return functools.partial(first_tokens, by_index, 0)


def first_tokens(from_token_by_index: Sequence[int], from_token: int, origin: Origin) -> list[int]:
    """For each completion, the position of the first token wanted."""
    n, by_index = origin.spec.n, list(from_token_by_index)
    field = "from_token_by_index" if by_index else "from_token"
    if len(by_index) > n:
        raise invalid(field, f"must have at most {n} entries")
    by_index += [from_token] * (n - len(by_index))
    if max(by_index) > origin.max_tokens:
        raise invalid(field, f"must be at most max_tokens, {origin.max_tokens}")
    return by_index


_PROMPT_FIELD = {"text": "text", "token_ids": "token_ids.ids", "chat": "chat.messages"}
PROMPT_FIELDS = frozenset({*_PROMPT_FIELD.values(), "prompt"})


def _deadline(request: inference_pb2.GenerateRequest) -> float | None:
    if not request.HasField("deadline"):
        return None
    stamp = request.deadline
    if not 0 <= stamp.nanos < 1_000_000_000 or not 0 <= stamp.seconds < 253_402_300_800:
        raise invalid("deadline", "must be a time between 1970 and 9999")
    return float(stamp.seconds) + stamp.nanos / 1e9


def to_prompt(request: inference_pb2.GenerateRequest, bounds: Bounds) -> CheckedPrompt:
    """The prompt, in one of its three forms."""
    match request.WhichOneof("prompt"):
        case "text":
            text = request.text
            if not text:
                raise invalid("text", "must not be empty")
            _check_size("text", [text], bounds)
            return TextPrompt(text)
        case "token_ids":
            return TokenPrompt(_token_ids(request.token_ids.ids, bounds))
        case "chat":
            return _chat(request.chat, bounds)
        case _:
            raise invalid("prompt", "must be given: one of text, token_ids, chat")


def _token_ids(ids: Sequence[int], bounds: Bounds) -> Int32Array:
    if not ids:
        raise invalid("token_ids.ids", "must not be empty")
    if 4 * len(ids) > bounds.max_prompt_bytes:
        raise _too_big("token_ids.ids", 4 * len(ids), bounds)
    values = np.array(ids, dtype=np.uint32)
    if int(values.max()) >= bounds.vocab_size:
        position = int(np.argmax(values >= bounds.vocab_size))
        raise invalid(
            f"token_ids.ids[{position}]",
            f"is {values[position]}, the vocabulary ends at {bounds.vocab_size - 1}",
        )
    return values.astype(np.int32)


def _chat(chat: inference_pb2.ChatMessages, bounds: Bounds) -> ChatPrompt:
    if not chat.messages:
        raise invalid("chat.messages", "must have at least one message")
    if len(chat.messages) > _MAX_MESSAGES:
        raise invalid("chat.messages", f"must be at most {_MAX_MESSAGES}")
    # Each access of a field makes its string anew.
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    for position, message in enumerate(messages):
        if not 1 <= len(message["role"].encode()) <= _MAX_ROLE_BYTES:
            must = f"must have 1 to {_MAX_ROLE_BYTES} bytes, e.g. user"
            raise invalid(f"chat.messages[{position}].role", must)
    _check_size("chat.messages", [message["content"] for message in messages], bounds)
    asks = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
    return ChatPrompt(messages, asks)


def _check_size(field: str, texts: Sequence[str], bounds: Bounds) -> None:
    if _MAX_BYTES_PER_CHAR * sum(map(len, texts)) <= bounds.max_prompt_bytes:
        return
    num_bytes = sum(len(text) if text.isascii() else len(text.encode()) for text in texts)
    if num_bytes > bounds.max_prompt_bytes:
        raise _too_big(field, num_bytes, bounds)


def _too_big(field: str, num_bytes: int, bounds: Bounds) -> ServiceError:
    return invalid(
        field, f"has {num_bytes} bytes, at most {bounds.max_prompt_bytes} are taken; shorten it"
    )


def check_sampling(sampling: common_pb2.SamplingParams, bounds: Bounds) -> None:
    """Raise for the first setting that is wrong."""
    vocab_size = bounds.vocab_size
    check_values(sampling)
    _check_stop(sampling, vocab_size)
    _check_bad_words(sampling, bounds)
    for token_id in sampling.logit_bias:
        if token_id >= vocab_size:
            refuse(f"logit_bias[{token_id}]", f"token ids must be below {vocab_size}", token_id)


def _check_stop(sampling: common_pb2.SamplingParams, vocab_size: int) -> None:
    if len(sampling.stop) > _MAX_STOP:
        refuse("stop", f"must be at most {_MAX_STOP} strings", len(sampling.stop))
    for position, stop in enumerate(sampling.stop):
        num_bytes = len(stop.encode())
        if not 1 <= num_bytes <= _MAX_STOP_BYTES:
            refuse(f"stop[{position}]", f"must have 1 to {_MAX_STOP_BYTES} bytes", num_bytes)
    if len(sampling.stop_token_ids) > _MAX_STOP_TOKEN_IDS:
        refuse(
            "stop_token_ids", f"must be at most {_MAX_STOP_TOKEN_IDS}", len(sampling.stop_token_ids)
        )
    for position, token_id in enumerate(sampling.stop_token_ids):
        if token_id >= vocab_size:
            refuse(f"stop_token_ids[{position}]", f"must be below {vocab_size}", token_id)


def _check_bad_words(sampling: common_pb2.SamplingParams, bounds: Bounds) -> None:
    limits = (("bad_words", _MAX_BAD_WORDS), ("bad_token_ids", bounds.max_bad_token_ids))
    for name, limit in limits:
        count = len(getattr(sampling, name))
        if count > limit:
            refuse(name, f"must be at most {limit}", count)
    for position, word in enumerate(sampling.bad_words):
        num_bytes = len(word.encode())
        if not 1 <= num_bytes <= _MAX_BAD_WORD_BYTES:
            must = f"must have 1 to {_MAX_BAD_WORD_BYTES} bytes"
            refuse(f"bad_words[{position}]", must, num_bytes)
    for position, sequence in enumerate(sampling.bad_token_ids):
        name, num_tokens = f"bad_token_ids[{position}].ids", len(sequence.ids)
        if not 1 <= num_tokens <= _MAX_BAD_WORD_TOKENS:
            refuse(name, f"must have 1 to {_MAX_BAD_WORD_TOKENS} tokens", num_tokens)
        if max(sequence.ids) >= bounds.vocab_size:
            refuse(name, f"must be below {bounds.vocab_size}", max(sequence.ids))


def control_stops(
    sampling: common_pb2.SamplingParams, tokenizer: TextTokenizer
) -> Mapping[int, str]:
    """The stop strings that are exactly a control token, by its id.

    Text leaves out control tokens, so these are found as tokens.
    """
    ids = tokenizer.special_id_by_token
    return {ids[stop]: stop for stop in sampling.stop if stop in ids}


def add_bad_token_ids(spec: Spec, sequences_by_word: Sequence[Sequence[Sequence[int]]]) -> None:
    """Adds the token sequences that spell each of bad_words to bad_token_ids."""
    sampling = spec.sampling
    assert isinstance(sampling, common_pb2.SamplingParams), "as to_spec makes it"
    for position, sequences in enumerate(sequences_by_word):
        if not sequences:
            raise invalid(f"sampling.bad_words[{position}]", "gives no tokens of this model")
        for sequence in sequences:
            sampling.bad_token_ids.add(ids=sequence)


def to_response(request_id: str, reply: Reply) -> inference_pb2.GenerateResponse:
    """One message to the client."""
    response = inference_pb2.GenerateResponse(request_id=request_id)
    for delta in reply.deltas:
        _fill(response.outputs.add(), delta)
    if reply.usage is not None:
        response.usage.prompt_tokens = reply.usage.prompt_tokens
        response.usage.completion_tokens = reply.usage.completion_tokens
        response.usage.cached_tokens = reply.usage.cached_tokens
        response.usage.draft_tokens = reply.usage.draft_tokens
        response.usage.accepted_draft_tokens = reply.usage.accepted_draft_tokens
    for encoded in reply.prompt_logprobs:
        response.prompt_logprobs.add().MergeFromString(encoded)
    return response


def _fill(output: inference_pb2.OutputDelta, delta: CompletionDelta) -> None:
    output.index = delta.index
    output.text = delta.text
    output.token_ids.extend(delta.token_ids)
    output.first_token_position = delta.first_token_position
    for encoded in delta.logprobs:
        output.logprobs.add().MergeFromString(encoded)
    if delta.text_offsets:
        output.text_offsets.extend(delta.text_offsets)
    finish = delta.finish
    if finish is None:
        return
    output.finish_reason = FINISH_REASON.number(finish.reason)
    if finish.reason is FinishReason.STOP:
        if finish.stop is not None:
            output.stop = finish.stop
        elif finish.stop_token_id is not None:
            output.stop_token_id = finish.stop_token_id
