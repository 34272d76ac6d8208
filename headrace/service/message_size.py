"""Counts the fields of an encoded message, to refuse messages that decoding would make large.

A field of two bytes can become an object of a hundred: 15 MB of empty chat messages take 450 MB.
Counting reads tags and lengths only and stops at the limit, which takes milliseconds at most.
"""

import functools
from typing import Any

from headrace.service.errors import malformed

# A request of 3,000 chat messages has 9,000 fields.
MAX_FIELDS = 10_000
# A tag and at least one byte.
_MIN_FIELD_BYTES = 2
# All bytes of a number but the last are at least this.
_LAST_BYTE = 0x80

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def too_many_fields(data: bytes, descriptor: Any, max_fields: int = MAX_FIELDS) -> bool:
    """Whether an encoded message has more than max_fields fields, nested fields included.

    Elements of a packed repeated field are not counted: decoded, they take at most four times
    their encoded size.

    Raises:
        ServiceError: the message is not well-formed.
    """
    if len(data) <= _MIN_FIELD_BYTES * max_fields:
        return False
    try:
        return _count(data, descriptor, max_fields) > max_fields
    except IndexError:
        raise malformed("the message ends in the middle of a field") from None


def _count(data: bytes, descriptor: Any, at_most: int) -> int:
    """The number of fields; counting stops at at_most + 1."""
    num_fields = 0
    unread = [(0, len(data), descriptor)]
    while unread and num_fields <= at_most:
        position, end, descriptor = unread.pop()
        messages = _messages_by_tag(descriptor)
        while position < end and num_fields <= at_most:
            num_fields += 1
            tag, position = _varint(data, position)
            kind = tag & 7
            if kind == _BYTES:
                size, position = _varint(data, position)
                if tag in messages:
                    unread.append((position, position + size, messages[tag]))
                position += size
            elif kind == _VARINT:
                _, position = _varint(data, position)
            elif kind in {_FIXED32, _FIXED64}:
                position += 4 if kind == _FIXED32 else 8
            else:
                raise malformed(f"wire type {kind} is not used")
        if position > end:
            raise malformed("a field reaches past the end of its message")
    return num_fields


@functools.cache
def _messages_by_tag(descriptor: Any) -> dict[int, Any]:
    """Descriptors of the fields that are messages, by the tag of their encoding."""
    return {
        field.number << 3 | _BYTES: field.message_type
        for field in descriptor.fields
        if field.message_type is not None
    }


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """A number of variable length, and the position after the number."""
    byte = data[position]
    if byte < _LAST_BYTE:
        return byte, position + 1
    value = byte & 0x7F
    for shift in range(7, 70, 7):
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < _LAST_BYTE:
            return value, position + 1
    raise malformed("a number has more than ten bytes")
