"""What a request may say: every fault has a code, names its field, and harms nobody else."""

import contextlib
import math

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.service.errors import ServiceError, from_rpc_error
from headrace.v1 import inference_pb2
from router.prompts import CheckedPrompt
from router.rpc import wire
from tests.router.fake_scheduler import MODEL, Script

BOUNDS = wire.Bounds(vocab_size=1000, max_prompt_bytes=100)


def request(**fields):
    if not {"text", "token_ids", "chat"} & fields.keys():
        fields["text"] = "hello"
    return inference_pb2.GenerateRequest(**fields)


def check(message):
    wire.check_tenant(message.tenant)
    spec = wire.to_spec(
        message,
        BOUNDS,
        request_id="r",
        model=MODEL,
        stop_by_token_id={},
        default_max_tokens=None,
        deadline_unix_s=None,
        traceparent="",
    )
    return spec, wire.to_prompt(message, BOUNDS)


NAN, INFINITE = math.nan, math.inf
BAD_SAMPLING = [
    ("temperature", -0.1), ("temperature", NAN), ("temperature", INFINITE),
    ("top_p", 0.0), ("top_p", 1.1), ("top_p", NAN), ("min_p", -0.1), ("min_p", 1.5), ("min_p", NAN),
    ("repetition_penalty", 0.0), ("repetition_penalty", NAN), ("repetition_penalty", INFINITE),
    ("presence_penalty", 2.1), ("presence_penalty", NAN), ("frequency_penalty", -3.0),
    ("max_tokens", 0), ("n", 0), ("n", 17), ("logprobs", 21), ("prompt_logprobs", 99),
    ("stop", ["x"] * 17), ("stop_token_ids", [1] * 65),
    ("bad_words", ["x"] * 65), ("bad_token_ids", [{"ids": [1]}] * 65),
    ("logit_bias", dict.fromkeys(range(1025), 0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_SAMPLING)
def test_a_bad_sampling_parameter_is_named(field, value):
    with pytest.raises(ServiceError) as caught:
        check(request(sampling={field: value}))
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == f"sampling.{field}"
    assert caught.value.message.startswith(f"sampling.{field}: must ")


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling.min_tokens", {"sampling": {"min_tokens": 5, "max_tokens": 4}}),
        ("sampling.stop[1]", {"sampling": {"stop": ["ok", ""]}}),
        ("sampling.stop[0]", {"sampling": {"stop": ["é" * 129]}}),
        ("sampling.stop_token_ids[1]", {"sampling": {"stop_token_ids": [1, 1000]}}),
        ("sampling.logit_bias[1000]", {"sampling": {"logit_bias": {1000: 1.0}}}),
        ("sampling.logit_bias[3]", {"sampling": {"logit_bias": {3: NAN}}}),
        ("sampling.logit_bias[3]", {"sampling": {"logit_bias": {3: -101.0}}}),
        ("sampling.bad_words[1]", {"sampling": {"bad_words": ["ok", ""]}}),
        ("sampling.bad_words[0]", {"sampling": {"bad_words": ["é" * 129]}}),
        ("sampling.bad_token_ids[1].ids", {"sampling": {"bad_token_ids": [{"ids": [1]}, {}]}}),
        ("sampling.bad_token_ids[0].ids", {"sampling": {"bad_token_ids": [{"ids": [1, 1000]}]}}),
        ("sampling.bad_token_ids[0].ids", {"sampling": {"bad_token_ids": [{"ids": [1] * 257}]}}),
        ("text", {"text": ""}),
        ("text", {"text": "é" * 51}),
        ("token_ids.ids", {"token_ids": {"ids": []}}),
        ("token_ids.ids", {"token_ids": {"ids": [1] * 26}}),
        ("token_ids.ids[2]", {"token_ids": {"ids": [1, 2, 1000]}}),
        ("token_ids.ids[0]", {"token_ids": {"ids": [2**32 - 1]}}),
        ("chat.messages", {"chat": {"messages": []}}),
        ("chat.messages[1].role", {"chat": {"messages": [{"role": "user"}, {"content": "x"}]}}),
        ("chat.messages[0].role", {"chat": {"messages": [{"role": "é" * 33, "content": "x"}]}}),
        ("chat.messages", {"chat": {"messages": [{"role": "user"}] * 2049}}),
        ("chat.messages", {"chat": {"messages": [{"role": "user", "content": "x" * 101}]}}),
        ("tenant", {"tenant": "t" * 65}),
        ("cache_salt", {"cache_salt": "é" * 65}),
        ("deadline", {"deadline": {"seconds": -1}}),
        ("deadline", {"deadline": {"seconds": 1, "nanos": -5}}),
        ("deadline", {"deadline": {"seconds": 2**62}}),
    ],
)
def test_a_bad_field_is_named(field, fields):
    with pytest.raises(ServiceError) as caught:
        check(request(**fields))
    assert (caught.value.code, caught.value.field) == (grpc.StatusCode.INVALID_ARGUMENT, field)


def test_a_request_without_a_prompt_is_told_what_there_is():
    with pytest.raises(ServiceError, match="prompt: must be given: one of text, token_ids, chat"):
        check(inference_pb2.GenerateRequest())


@pytest.mark.parametrize("kind", ["TYPE_JSON_SCHEMA", "TYPE_GRAMMAR", 77])
def test_other_shapes_of_output_are_not_served_yet(kind):
    with pytest.raises(ServiceError) as caught:
        check(request(response_format={"type": kind}))
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    check(request(response_format={"type": "TYPE_TEXT"}))


@pytest.mark.parametrize("request_id", ["a b", "é", "x" * 129, "a/", "/a", "a/b/c", "id#0", "a\n"])
def test_an_id_of_other_characters_is_refused(request_id):
    with pytest.raises(ServiceError, match="request_id: must be 1 to 128 characters"):
        wire.check_request_id(request_id)


def test_models_are_chosen_by_name_or_by_being_the_only_one():
    assert wire.choose_model("", ["a"]) == "a"
    assert wire.choose_model("b", ["a", "b"]) == "b"
    with pytest.raises(ServiceError, match="served: a, b") as caught:
        wire.choose_model("c", ["b", "a"])
    assert (caught.value.code, caught.value.field) == (grpc.StatusCode.NOT_FOUND, "model")
    with pytest.raises(ServiceError, match="must be given") as caught:
        wire.choose_model("", ["b", "a"])
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_the_edges_of_every_range_are_taken():
    sampling = {
        "temperature": 0, "top_p": 1, "min_p": 1, "repetition_penalty": 1e-3, "n": 16,
        "presence_penalty": 2, "frequency_penalty": -2, "logit_bias": {999: 100, 0: -100},
        "max_tokens": 1, "min_tokens": 1, "stop": ["x" * 256] * 16, "logprobs": 20,
        "bad_words": ["x" * 256] * 64, "bad_token_ids": [{"ids": [999] * 256}] * 64,
        "stop_token_ids": [999] * 64, "prompt_logprobs": 20, "seed": 2**64 - 1,
    }  # fmt: skip
    spec, _ = check(request(sampling=sampling, tenant="t" * 64, cache_salt="s" * 128))
    assert (spec.n, spec.seed, spec.max_tokens, spec.min_tokens) == (16, 2**64 - 1, 1, 1)


def test_seeds_that_are_not_given_differ():
    assert check(request())[0].seed != check(request())[0].seed


BAD_CALLS = [
    ({"text": ""}, "INVALID_ARGUMENT", "text"),
    ({"model": "other"}, "NOT_FOUND", "model"),
    ({"sampling": {"temperature": -1}}, "INVALID_ARGUMENT", "sampling.temperature"),
    ({"sampling": {"max_tokens": 0}}, "INVALID_ARGUMENT", "sampling.max_tokens"),
    ({"text": "x" * 10_000_000}, "INVALID_ARGUMENT", "text"),
    ({"text": "h w " * 3_000}, "INVALID_ARGUMENT", "text"),
    ({"token_ids": {"ids": [5] * 5_000}}, "INVALID_ARGUMENT", "token_ids.ids"),
    ({"sampling": {"max_tokens": 5_000}}, "INVALID_ARGUMENT", "sampling.max_tokens"),
    ({"token_ids": {"ids": [200_000]}}, "INVALID_ARGUMENT", "token_ids.ids[0]"),
    ({"chat": {"messages": [{"role": "wizard"}]}}, "INVALID_ARGUMENT", "chat.messages"),
    ({"request_id": "no good"}, "INVALID_ARGUMENT", "request_id"),
]


@pytest.mark.parametrize(("fields", "code", "field"), BAD_CALLS)
async def test_a_bad_call_fails_alone(stack, fields, code, field):
    stack.scheduler.is_paced = False
    neighbour = stack.generate()
    await stack.until(lambda: stack.scheduler.live)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.answer(**fields) if "text" in fields else await stack.answer("ok", **fields)
    error = from_rpc_error(caught.value)
    assert (error.code.name, error.field) == (code, field)
    stack.scheduler.resume()
    assert (await stack.rest(neighbour))[-1].HasField("usage")
    assert len(stack.scheduler.submissions) == 1


# Field numbers and wire types of a GenerateRequest, and then anything.
KNOWN_PIECES = [
    b"\x0a\x03abc", b"\x1a\x05hello", b"\x1a\x02\xff\xfe", b"\x22\x04\x0a\x02\x01\x02",
    b"\x2a\x08\x0a\x06\x0a\x04user", b"\x32\x05\x0d\x00\x00\xc0\x7f", b"\x32\x02\x50\x00",
    b"\x32\x02\x78\x10", b"\x38\xff\xff\xff\xff\x0f", b"\x4a\x02\x08\x01", b"\x68\x01",
]  # fmt: skip
PIECES = st.one_of(st.binary(max_size=12), st.sampled_from(KNOWN_PIECES))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(payload=st.lists(PIECES, max_size=6).map(b"".join))
def test_any_message_is_taken_or_refused_in_words(payload):
    with contextlib.suppress(DecodeError):  # refused before it gets to us, see test_serving
        message = inference_pb2.GenerateRequest.FromString(payload)
        with contextlib.suppress(ServiceError):
            spec, prompt = check(message)
            assert 1 <= spec.n <= 16
            assert isinstance(prompt, CheckedPrompt)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(payloads=st.lists(st.lists(PIECES, max_size=6).map(b"".join), min_size=5, max_size=5))
async def test_fuzzed_calls_leave_nothing(fuzzed_stack, payloads):
    call = fuzzed_stack.channel.unary_stream(
        "/headrace.v1.Inference/Generate", request_serializer=bytes, response_deserializer=bytes
    )
    for payload in payloads:
        answer = call(payload, timeout=20)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in answer:
                pass
        assert await answer.code() not in {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
    await fuzzed_stack.until(lambda: fuzzed_stack.is_empty)


@pytest.fixture
async def fuzzed_stack(stack):
    stack.scheduler.script = lambda _: Script([65, 66])
    return stack
