"""What the store gives is outside input: the answer is a request, or a clear error."""

import contextlib
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.service.errors import ServiceError
from headrace.status.records import Record, Stored, StoredCompletion
from headrace.status.states import State
from headrace.v1 import common_pb2, inference_pb2, record_pb2
from router.request import Spec
from router.revival import Origin
from router.rpc import stored_spec
from tests.router.bench import Bench
from tests.router.tiny_models import byte_level_model

MODELS = {"tiny": byte_level_model()}


def spec(**changes):
    message = record_pb2.RequestSpec(
        request=inference_pb2.GenerateRequest(
            request_id="r", model="tiny", sampling={"seed": 1, "stop": ["END"], "n": 2}
        ),
        prompt_token_ids=array("i", [1, 2, 3]).tobytes(),
        prompt_field="text",
        max_tokens=10,
        arrival_time_unix_s=1000.0,
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def stored(message, *, token_ids=(), state=State.RUNNING, **fields):
    completions = [
        StoredCompletion(
            record=Record(
                request_id=f"r#{index}",
                state=state,
                epoch=3,
                create_time_unix_s=1000.0,
                update_time_unix_s=1000.0,
            ),
            token_ids=array("i", token_ids).tobytes(),
        )
        for index in range(2)
    ]
    data = message if isinstance(message, bytes) else message.SerializeToString()
    return Stored(**{"request_id": "r", "spec": data, "completions": completions} | fields)


def decode(found):
    return stored_spec.decode(found, MODELS)


def test_what_is_written_is_read_back():
    sampling = common_pb2.SamplingParams(seed=9, stop=["END", "<|end|>"], logprobs=3, temperature=0)
    bench = Bench()
    prompt = np.arange(1, 6, dtype=np.int32)
    with bench.router.reserve("r", "acme", b"hash") as reservation:
        written = Spec(
            request_id="r",
            model="tiny",
            sampling=sampling,
            seed=9,
            prompt_field="chat.messages",
            stop=("END", "<|end|>"),
            stop_by_token_id={MODELS["tiny"].tokenizer.special_id_by_token["<|end|>"]: "<|end|>"},
            num_logprobs=3,
            echo=True,
            priority=-2,
            tenant="acme",
            cache_salt="salt",
            deadline_unix_s=5000.0,
            traceparent="00-1-2-01",
            body_sha256=b"hash",
            goes_on=True,
            recovers_at_once=True,
        )
        bench.add("t", model="tiny")
        request = bench.router.submit(
            reservation, written, prompt, "text", MODELS["tiny"].tokenizer
        )
        found = decode(stored(stored_spec.encode(request), completions=stored(b"").completions[:1]))
    assert found.spec == written
    assert found.prompt_token_ids.tolist() == prompt.tolist()
    assert (found.prompt_text, found.max_tokens) == ("text", request.max_tokens)
    assert found.arrived_unix_s == request.arrived_unix_s


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt_token_ids": b""},
        {"prompt_token_ids": b"\x01\x02"},
        {"prompt_token_ids": b"\xff\xff\xff\xff"},
        {"max_tokens": 0},
        {"max_tokens": 2**32 - 1},
        {"arrival_time_unix_s": float("nan")},
        {"deadline_unix_s": float("inf")},
        {"deadline_unix_s": -1.0},
        {"prompt_field": "x" * 5000},
        {"traceparent": "x" * 5000},
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_a_corrupt_record(changes):
    with pytest.raises(ServiceError) as caught:
        decode(stored(spec(**changes)))
    assert caught.value.reason == "CORRUPT_RECORD"


@pytest.mark.parametrize(
    "fields",
    [
        {"token_ids": [-1]},
        {"token_ids": [1] * 11},
        {"request_id": "another"},
        {"completions": ()},
        {"prompt_logprobs": [b"\xff"]},
    ],
    ids=str,
)
def test_a_journal_that_does_not_fit_is_a_corrupt_record(fields):
    with pytest.raises(ServiceError) as caught:
        decode(stored(spec(), **fields))
    assert caught.value.reason == "CORRUPT_RECORD"


def test_a_model_that_is_not_served_here_is_not_found():
    message = spec()
    message.request.model = "other"
    with pytest.raises(ServiceError) as caught:
        decode(stored(message))
    assert caught.value.reason == "UNKNOWN_MODEL"


def test_the_only_model_is_meant_where_none_is_named():
    message = spec()
    message.request.model = ""
    assert decode(stored(message)).spec.model == "tiny"


def test_a_request_without_a_spec_cannot_be_resumed():
    with pytest.raises(ServiceError) as caught:
        decode(stored(b""))
    assert caught.value.reason == "NOT_KEPT"


@given(data=st.binary(max_size=300))
def test_any_bytes_give_a_request_or_an_error(data):
    with contextlib.suppress(ServiceError):
        assert isinstance(decode(stored(data)), Origin)
    stored_spec.body_of(stored(data))


@given(
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 200),
    token_ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=12),
    state=st.sampled_from(list(State)),
)
def test_a_damaged_record_gives_a_request_or_an_error(changes, cut, token_ids, state):
    data = bytearray(spec().SerializeToString())
    for position, value in changes:
        data[position % len(data)] = value
    damaged = stored(bytes(data[: len(data) - cut % 20]), token_ids=token_ids, state=state)
    reason = ""
    try:
        assert len(decode(damaged).pasts) == 2
    except ServiceError as error:
        reason = error.reason
    assert reason in {"", "CORRUPT_RECORD", "UNKNOWN_MODEL", "NOT_KEPT", "RESPONSE_FORMAT"}
