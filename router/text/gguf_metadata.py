"""The key-value header of a GGUF file, read without touching its tensors.

The `gguf` package makes an array of every string of the vocabulary and takes seconds for what is
a few megabytes of length-prefixed values.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct code; little endian throughout.
_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?",
    10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip


class GgufFormatError(ValueError):
    """The file is not GGUF, of a version we do not know, or cut short."""


class _Reader:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def string(self) -> str:
        size = self.scalar("<Q")
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise GgufFormatError("the header ends inside a string")
        # Vocabularies with broken UTF-8 exist; such a token must not stop the server.
        return self._data[begin : self._at].decode("utf-8", errors="replace")

    def array(self) -> list[Any]:
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind in {_STRING, _ARRAY}:
            return [self.value(kind) for _ in range(count)]
        code = f"<{count}{self._code(kind)[1:]}"
        values = list(struct.unpack_from(code, self._data, self._at))
        self._at += struct.calcsize(code)
        return values

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(self._code(kind))

    @staticmethod
    def _code(kind: int) -> str:
        if kind not in _SCALARS:
            raise GgufFormatError(f"unknown value type {kind} in the header")
        return _SCALARS[kind]


def read_gguf_metadata(file: Path) -> dict[str, Any]:
    """Every key of the header; raises GgufFormatError, or OSError when it cannot be read."""
    with file.open("rb") as stream:
        if stream.read(4) != _MAGIC:
            raise GgufFormatError(f"{file} does not begin with GGUF")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data)
            reader.scalar("<I")  # the magic
            version = reader.scalar("<I")
            if version not in {2, 3}:
                raise GgufFormatError(f"{file} is GGUF version {version}; 2 and 3 are read")
            try:
                reader.scalar("<Q")  # number of tensors
                num_keys = reader.scalar("<Q")
                return {reader.string(): reader.value(reader.scalar("<I")) for _ in range(num_keys)}
            except struct.error as error:
                raise GgufFormatError(f"{file}: the header is cut short") from error
