"""Counting fields of encoded messages agrees with decoding them."""

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given
from hypothesis import strategies as st

from headrace.service import message_size
from headrace.service.errors import ServiceError
from headrace.service.message_size import MAX_FIELDS, too_many_fields
from headrace.v1 import inference_pb2

GENERATE = inference_pb2.GenerateRequest.DESCRIPTOR

texts = st.text(max_size=200)
requests = st.builds(
    inference_pb2.GenerateRequest,
    request_id=texts,
    priority=st.integers(-(2**31), 2**31 - 1),
    chat=st.builds(
        inference_pb2.ChatMessages,
        messages=st.lists(st.builds(inference_pb2.ChatMessage, role=texts, content=texts)),
    ),
    sampling=st.fixed_dictionaries(
        {
            "stop": st.lists(texts),
            "temperature": st.floats(0, 1),
            "seed": st.integers(0, 2**64 - 1),
            "logit_bias": st.dictionaries(st.integers(0, 1000), st.floats(0, 1, width=32)),
            "stop_token_ids": st.lists(st.integers(0, 2**32 - 1)),
        }
    ),
)


def num_fields(message: Message) -> int:
    """Of a decoded message: one for each element that is not packed, and those in it."""
    total = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            total += 3 * len(value)
        elif field.is_packed:
            total += 1
        else:
            for element in value if field.is_repeated else [value]:
                total += 1 + (num_fields(element) if isinstance(element, Message) else 0)
    return total


@given(requests)
def test_counts_what_decoding_gives(request):
    data = request.SerializeToString()
    assert message_size._count(data, GENERATE, 10**9) == num_fields(request)


def repeated(field: bytes, times: int = MAX_FIELDS + 1) -> bytes:
    return field * times


def chat(messages: bytes) -> bytes:
    size = len(messages)
    return b"\x2a" + bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + messages


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(chat(repeated(b"\x0a\x00")), id="empty chat messages"),
        pytest.param(repeated(b"\x2a\x00\x22\x00", MAX_FIELDS // 2 + 1), id="a oneof to and fro"),
        pytest.param(repeated(b"\x32\x02\x62\x00", MAX_FIELDS // 2 + 1), id="stop, a time each"),
        pytest.param(repeated(b"\xa2\x06\x00"), id="fields nobody knows"),
        pytest.param(repeated(b"\x38\x00"), id="one number again and again"),
    ],
)
def test_a_small_message_of_many_fields_is_too_many(data):
    assert too_many_fields(data, GENERATE)


def test_a_long_text_and_many_token_ids_are_few_fields():
    text = inference_pb2.GenerateRequest(text="a" * 4_000_000)
    ids = inference_pb2.GenerateRequest(token_ids={"ids": range(1_000_000)})
    for request in (text, ids):
        assert not too_many_fields(request.SerializeToString(), GENERATE)


@given(requests, st.data())
def test_broken_bytes_are_counted_or_malformed(request, data):
    encoded = bytearray(request.SerializeToString() or b"\x00")
    for position in data.draw(st.lists(st.integers(0, len(encoded) - 1), max_size=5)):
        encoded[position] = data.draw(st.integers(0, 255))
    try:
        is_too_many = too_many_fields(bytes(encoded), GENERATE, 8)
        decoded = inference_pb2.GenerateRequest.FromString(bytes(encoded))
    except (ServiceError, DecodeError):
        return
    # What repeats and merges, or is unknown, is counted but not seen in the message.
    assert is_too_many or num_fields(decoded) <= 8
