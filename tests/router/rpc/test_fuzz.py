"""Any message at all, to every method of a real router: answered in words, and nothing left.

Messages are drawn field by field from the protocol itself, so a new field is fuzzed from its first
day; bytes that are no message are in `test_wire`.
"""

import asyncio
import contextlib
import math

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.v1 import common_pb2, inference_pb2
from tests.router.fake_scheduler import MODEL, Script

NEVER = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
SETTINGS = settings(max_examples=60, suppress_health_check=list(HealthCheck))


def wholes(low, high):
    edges = [value for value in (low, 0, 1, 2, 16, 17, 4096, high) if low <= value <= high]
    return st.one_of(st.sampled_from(edges), st.integers(low, high))


FLOATS = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, -100.0, math.nan, math.inf, -math.inf]),
    st.floats(width=32),
)
TEXTS = st.one_of(
    st.sampled_from(["", "r", "same", MODEL, "user", "hello", "<|end|>", "\x00", "x" * 300]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
)
KINDS = {
    FieldDescriptor.TYPE_INT32: wholes(-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: wholes(-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: wholes(0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: wholes(0, 2**64 - 1),
    FieldDescriptor.TYPE_FLOAT: FLOATS,
    FieldDescriptor.TYPE_DOUBLE: FLOATS,
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: TEXTS,
    FieldDescriptor.TYPE_ENUM: st.integers(-1, 9),
}


@st.composite
def fields(draw, descriptor, max_fields=6):
    """Values of some of a message's fields, as its constructor takes them."""
    by_name = {field.name: field for field in descriptor.fields}
    names = st.sampled_from(sorted(by_name))
    chosen = draw(st.lists(names, unique=True, min_size=1, max_size=max_fields))
    return {name: draw(values(by_name[name])) for name in chosen}


def values(field):
    kind = field.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = kind.fields_by_name["key"], kind.fields_by_name["value"]
        return st.dictionaries(KINDS[key.type], KINDS[value.type], max_size=3)
    one = KINDS[field.type] if kind is None else fields(kind)
    return st.lists(one, max_size=4) if field.is_repeated else one


# Half of them differ from a good request by little, or hardly any would get far.
sampling = fields(common_pb2.SamplingParams.DESCRIPTOR, max_fields=2)
near = st.fixed_dictionaries(
    {"text": st.just("hello")},
    optional={
        "sampling": sampling,
        "priority": wholes(-(2**31), 2**31 - 1),
        "tenant": TEXTS,
        "request_id": st.sampled_from(["same", "other"]),
        "echo": st.booleans(),
        "deadline": fields(inference_pb2.GenerateRequest().deadline.DESCRIPTOR),
        "chat": fields(inference_pb2.ChatMessages.DESCRIPTOR),
    },
)
any_request = st.one_of(near, near, fields(inference_pb2.GenerateRequest.DESCRIPTOR, max_fields=9))


@pytest.fixture
def fuzzed(stack):
    stack.scheduler.script = lambda _: Script([65, 66])
    return stack


async def code_of(call):
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


@SETTINGS
@given(requests=st.lists(any_request, min_size=4, max_size=8), num_cancelled=st.integers(0, 2))
async def test_any_requests_at_once_are_answered_and_leave_nothing(fuzzed, requests, num_cancelled):
    calls = [
        fuzzed.stub.Generate(inference_pb2.GenerateRequest(**one), timeout=20) for one in requests
    ]
    for call in calls[:num_cancelled]:
        call.cancel()
    codes = await asyncio.gather(*(code_of(call) for call in calls[num_cancelled:]))
    assert not NEVER & set(codes)
    await fuzzed.until(lambda: fuzzed.is_empty and not fuzzed.scheduler.live)
    router = fuzzed.router
    assert router.meters.num_accepted == sum(router.meters.num_ended.values())


@pytest.mark.parametrize("method", ["Abort", "GetStatus", "Explain", "Resume", "ListModels"])
@SETTINGS
@given(data=st.data())
async def test_any_call_of_the_other_methods_is_answered(fuzzed, method, data):
    kind = getattr(inference_pb2, f"{method}Request")
    chosen = data.draw(fields(kind.DESCRIPTOR)) if kind.DESCRIPTOR.fields else {}
    call = getattr(fuzzed.stub, method)(kind(**chosen), timeout=20)
    if method == "Resume":
        assert await code_of(call) not in NEVER
    else:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call
        assert await call.code() not in NEVER
