"""Reads a GGUF file's header: key-value pairs and where each tensor lies.

The `gguf` package does this too, but keeps each of a vocabulary's strings as arrays, which takes
seconds; here arrays of strings are skipped, for text lives in the router.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from gpuworker.models.errors import WeightError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_FORMAT_BY_TYPE = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor's place; shape is rows first, as torch has it."""

    name: str
    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int  # bytes from the file's start
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (without arrays of strings), tensors by name, and the mapped file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    buffer: mmap.mmap


def read_header(file: Path) -> GgufHeader:
    """Reads and checks a file's header.

    Raises:
        WeightError: it is not a GGUF file, or is truncated; the message names the tensor cut.
    """
    if not file.is_file():
        raise WeightError(f"there is no model at {file}")
    if file.stat().st_size < 24:
        raise WeightError(f"{file.name} is not a GGUF file")
    with file.open("rb") as stream:
        buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Reader(file.name, buffer).header()
    except (struct.error, UnicodeDecodeError):
        raise WeightError(f"{file.name} is truncated within its header") from None


class _Reader:
    def __init__(self, name: str, buffer: mmap.mmap) -> None:
        self._name = name
        self._buffer = buffer
        self._at = 0

    def header(self) -> GgufHeader:
        if self._bytes(4) != _MAGIC:
            raise WeightError(f"{self._name} is not a GGUF file")
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise WeightError(
                f"{self._name} has GGUF version {version}; supported are: {_VERSIONS}"
            )
        num_tensors, num_pairs = self._scalar("<Q"), self._scalar("<Q")
        metadata = {}
        for _ in range(num_pairs):
            key = self._string()
            value = self._value(self._scalar("<I"))
            if value is not None:
                metadata[key] = value
        places = [self._tensor() for _ in range(num_tensors)]
        alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
        data_start = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in places:
            tensors[name] = self._placed(name, shape, kind, data_start + offset)
        return GgufHeader(metadata, tensors, self._buffer)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = [self._scalar("<Q") for _ in range(self._scalar("<I"))]
        return name, tuple(reversed(dimensions)), self._scalar("<I"), self._scalar("<Q")

    def _placed(self, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GgufTensor:
        try:
            quantization = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise WeightError(f"tensor {name!r} has the unknown type {kind}") from None
        block_size, type_size = gguf.GGML_QUANT_SIZES[quantization]
        num_bytes = math.prod(shape) // block_size * type_size
        if offset + num_bytes > len(self._buffer):
            raise WeightError(
                f"tensor {name!r} is truncated: it should end at byte {offset + num_bytes}, "
                f"the file has {len(self._buffer)}"
            )
        return GgufTensor(name, shape, quantization, offset, num_bytes)

    def _value(self, kind: int) -> Any:
        """A value; None for an array of strings."""
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._scalar(self._format(kind))

    def _array(self) -> list[Any] | None:
        kind, count = self._scalar("<I"), self._scalar("<Q")
        if kind == _STRING:
            self._skip_strings(count)
            return None
        if kind == _ARRAY:
            raise WeightError(f"{self._name} has an array of arrays, which GGUF does not use")
        form = self._format(kind)
        values = struct.unpack_from(f"<{count}{form[1]}", self._buffer, self._at)
        self._at += count * struct.calcsize(form)
        return list(values)

    def _skip_strings(self, count: int) -> None:
        at, buffer, unpack = self._at, self._buffer, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + unpack(buffer, at)[0]
        self._at = at

    def _format(self, kind: int) -> str:
        if kind not in _FORMAT_BY_TYPE:
            raise WeightError(f"{self._name} has a value of the unknown type {kind}")
        return _FORMAT_BY_TYPE[kind]

    def _scalar(self, form: str) -> Any:
        value = struct.unpack_from(form, self._buffer, self._at)[0]
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        return self._bytes(self._scalar("<Q")).decode("utf-8")

    def _bytes(self, count: int) -> bytes:
        data = self._buffer[self._at : self._at + count]
        if len(data) < count:
            raise WeightError(f"{self._name} is truncated within its header")
        self._at += count
        return data
