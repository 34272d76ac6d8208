"""Reads a GGUF file's header: its key-value pairs and the location of its tensors.

Every number in the file is checked against the file's size and the format's bounds before the
number sizes an allocation or a loop. The caller interprets the values. The `gguf` package reads
headers too, but stores each string of a vocabulary as arrays, which takes seconds.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct code.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_ALIGNMENT_KEY = "general.alignment"
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_DIMENSIONS = 4
# Real headers have a few hundred pairs and tensors, vocabularies of 300,000 and less than 20 MB.
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_ARRAY_VALUES = 1 << 23  # sum over all arrays
_MAX_HEADER_BYTES = 1 << 28
# The smallest size in the file: a pair is a length, a type and a byte; a tensor is a length, a
# number of dimensions, one dimension, a type and an offset.
_MIN_PAIR_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8


class GgufError(ValueError):
    """The file is not GGUF or is damaged; the message names file, key and value."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in the header: `shape` is rows first, `kind` is GGML's type number."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the file's start; within the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Values by key, tensors by name, and the mapped file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    buffer: mmap.mmap


def read_gguf_header(file: Path, *, with_strings: bool) -> GgufHeader:
    """Reads and validates a file's header.

    Args:
        file: to read.
        with_strings: whether to keep arrays of strings (vocabularies).

    Raises:
        GgufError: the file is not GGUF, ends within its header, or has a value out of bounds.
        OSError: the file cannot be read.
    """
    with file.open("rb") as stream:
        if stream.read(len(_MAGIC)) != _MAGIC:
            raise GgufError(f"{file.name} is not a GGUF file")
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Reader(file.name, buffer, with_strings=with_strings).header()
    except (struct.error, UnicodeDecodeError) as error:
        raise GgufError(f"{file.name} is truncated within its header, or damaged") from error


class _Reader:
    def __init__(self, name: str, buffer: mmap.mmap, *, with_strings: bool) -> None:
        self._name = name
        self._buffer = buffer
        self._end = min(len(buffer), _MAX_HEADER_BYTES)
        self._at = len(_MAGIC)
        self._with_strings = with_strings
        self._num_array_values = 0

    def header(self) -> GgufHeader:
        version = self._scalar("<I")
        if version not in _VERSIONS:
            self._refuse("version", version, f"one of {_VERSIONS}")
        num_tensors, num_pairs = self._scalar("<Q"), self._scalar("<Q")
        self._check_count("number of pairs", num_pairs, _MAX_PAIRS, _MIN_PAIR_BYTES)
        self._check_count("number of tensors", num_tensors, _MAX_TENSORS, _MIN_TENSOR_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._string("a key")
            if key in metadata:
                raise GgufError(f"{self._name} has the key {key!r} twice")
            metadata[key] = self._value(key, self._scalar("<I"))
        infos: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = self._string("a tensor's name")
            if name in infos:
                raise GgufError(f"{self._name} has the tensor {name!r} twice")
            infos[name] = self._tensor(name)
        alignment = self._alignment(metadata)
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._located(name, t, start, alignment) for name, t in infos.items()}
        # Arrays that are not kept are None.
        kept = {key: value for key, value in metadata.items() if value is not None}
        return GgufHeader(kept, tensors, self._buffer)

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if not is_number or not 0 < value <= _MAX_ALIGNMENT or value & (value - 1):
            self._refuse(_ALIGNMENT_KEY, value, f"a power of two up to {_MAX_ALIGNMENT}")
        return int(value)

    def _tensor(self, name: str) -> TensorInfo:
        """A tensor's entry; its offset still counts from the start of the data section."""
        count = self._scalar("<I")
        if not 0 < count <= _MAX_DIMENSIONS:
            self._refuse(f"dimensions of tensor {name!r}", count, f"1 to {_MAX_DIMENSIONS}")
        shape = tuple(self._scalar("<Q") for _ in range(count))[::-1]
        if 0 in shape:
            self._refuse(f"shape of tensor {name!r}", list(shape), "at least 1 in each dimension")
        return TensorInfo(shape, self._scalar("<I"), self._scalar("<Q"))

    def _located(self, name: str, tensor: TensorInfo, start: int, alignment: int) -> TensorInfo:
        if tensor.offset % alignment:
            self._refuse(f"offset of tensor {name!r}", tensor.offset, f"a multiple of {alignment}")
        offset = start + tensor.offset
        if offset >= len(self._buffer):
            raise GgufError(
                f"tensor {name!r} is truncated: it should begin at byte {offset} of {self._name}, "
                f"which has {len(self._buffer)}"
            )
        return TensorInfo(tensor.shape, tensor.kind, offset)

    def _value(self, key: str, kind: int) -> Any:
        """Reads a value; None for an array of strings that is not kept."""
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._scalar(self._code(key, kind))

    def _array(self, key: str) -> list[Any] | None:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        code = "<Q" if kind == _STRING else self._code(key, kind)
        size = struct.calcsize(code)
        self._check_count(f"length of {key!r}", count, _MAX_ARRAY_VALUES, size)
        self._num_array_values += count
        if self._num_array_values > _MAX_ARRAY_VALUES:
            raise GgufError(f"{self._name} has arrays of more than {_MAX_ARRAY_VALUES} values")
        if kind == _STRING:
            return self._strings(key, count)
        values = struct.unpack_from(f"<{count}{code[1]}", self._buffer, self._at)
        self._at += count * size
        return list(values)

    def _strings(self, key: str, count: int) -> list[str] | None:
        if self._with_strings:
            return [self._string(key) for _ in range(count)]
        at, buffer, unpack = self._at, self._buffer, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(buffer, at)[0]
        self._at = at
        return None

    def _code(self, key: str, kind: int) -> str:
        if kind not in _SCALARS:
            self._refuse(f"type of {key!r}", kind, f"one of {sorted((*_SCALARS, _STRING))}")
        return _SCALARS[kind]

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from(code, self._buffer, self._at)[0]
        self._at += struct.calcsize(code)
        return value

    def _string(self, what: str) -> str:
        size = self._scalar("<Q")
        if size > self._end - self._at:
            raise GgufError(
                f"{self._name} is truncated within its header: {what!r} should have {size} bytes, "
                f"{max(self._end - self._at, 0)} are left"
            )
        begin, self._at = self._at, self._at + size
        # Vocabularies with broken UTF-8 exist; such a token must not stop the server.
        return self._buffer[begin : self._at].decode("utf-8", errors="replace")

    def _check_count(self, what: str, count: int, most: int, item_bytes: int) -> None:
        """Refuses a count above the limit, or above what the rest of the header can hold."""
        most = min(most, max(self._end - self._at, 0) // item_bytes)
        if count > most:
            raise GgufError(
                f"{self._name} is truncated within its header, or damaged: {what} is {count}; "
                f"at most {most} fit"
            )

    def _refuse(self, what: str, value: Any, allowed: str) -> NoReturn:
        raise GgufError(f"{self._name}: {what} is {value!r}; it must be {allowed}")
