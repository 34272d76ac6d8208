"""Reads recorded runs from files: JSON traces, recordings, archives of traces.

Files are untrusted input. A file is read record by record, every record is validated (see
`schema`), and the part held in memory is bounded; a ValueError names the file and the line.
"""

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import msgspec

from scheduler.replay.schema import decode_head, decode_step
from scheduler.replay.trace import TraceRecord

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# Limit on a line of a recording, on a trace in one JSON object and on an archive's member.
_MAX_RECORD_BYTES = 64 << 20
# Limit on the unpacked size; a recording that never rotated may be long.
_MAX_FILE_BYTES = 4 << 30
_MAX_MEMBERS = 10_000
_MAX_TAR_HEADER_BYTES = 1 << 20
_MAX_XZ_MEMORY_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 16

_Open = Callable[[], AbstractContextManager[BinaryIO]]
_ReadSteps = Callable[[], Iterator[tuple[str, bytes | msgspec.Raw]]]
# The errors that a truncated or damaged file can raise.
UNPACK_ERRORS = (OSError, EOFError, lzma.LZMAError, zlib.error, tarfile.TarError)


class RecordedSteps:
    """The steps of a trace, read anew each time they are iterated.

    `where` names the step read last. In a recording, requests that a step adds are in `requests`
    only while that step is the last step read.
    """

    def __init__(self, read: _ReadSteps, requests: dict[str, TraceRecord]) -> None:
        self.where = "its first record"
        self._read = read
        self._first_requests = dict(requests)
        self._requests = requests

    def __iter__(self) -> Iterator[TraceRecord]:
        self._requests.clear()
        self._requests.update(self._first_requests)
        added: TraceRecord = {}
        for where, data in self._read():
            self.where = where
            step = cast("TraceRecord", decode_step(data))
            for name in added:
                self._requests.pop(name, None)
            added = step.pop("requests", {})
            self._requests.update(added)
            yield step


def read_traces(path: Path) -> Iterator[tuple[str, TraceRecord]]:
    """The traces in a file, by name: one, or those of a tar archive. `steps` is a RecordedSteps.

    Raises:
        ValueError: the file holds no trace.
    """
    try:
        if not _is_archive(path):
            yield path.name, _trace(str(path), partial(_unpacked_file, path))
            return
        is_empty = True
        with _unpacked_file(path) as file:
            for name, data in _members(file):
                is_empty = False
                yield name, _trace(f"{path}: {name}", partial(_unpacked_bytes, data))
        if is_empty:
            raise ValueError(f"{path} holds no trace")
    except UNPACK_ERRORS as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _trace(name: str, open_file: _Open) -> TraceRecord:
    """Reads one JSON object, or a recording with one record per line."""
    try:
        head, read_steps = _head(open_file)
        requests = head.setdefault("requests", {})
        head["steps"] = RecordedSteps(read_steps, requests)
        if next(read_steps(), None) is None:
            raise ValueError("no step is recorded in it yet")
    except (ValueError, RecursionError, msgspec.DecodeError, *UNPACK_ERRORS) as error:
        raise ValueError(f"{name} is no trace: {error}") from error
    return head


def _head(open_file: _Open) -> tuple[TraceRecord, _ReadSteps]:
    """A trace's first record, and a function that reads its steps."""
    with open_file() as file:
        data = _limited(file.readline(_MAX_RECORD_BYTES + 1), "line 1")
        try:
            head = cast("TraceRecord", decode_head(data))
        except msgspec.ValidationError as error:
            raise ValueError(f"line 1: {error}") from error
        except msgspec.DecodeError as error:
            # The file may be a JSON object on many lines.
            data += file.read(_MAX_RECORD_BYTES + 1 - len(data))
            try:
                head = cast("TraceRecord", decode_head(_limited(data, "its JSON")))
            except msgspec.DecodeError as second:
                raise ValueError(f"line 1: {error}; as a whole: {second}") from second
            head.setdefault("steps", [])
    if "steps" in head:
        steps: list[msgspec.Raw] = head.pop("steps")
        return head, lambda: ((f"step {i}", step) for i, step in enumerate(steps))
    return head, lambda: _lines(open_file)


def _lines(open_file: _Open) -> Iterator[tuple[str, bytes]]:
    """A recording's records after the first; an incomplete last record is ignored."""
    with open_file() as file:
        num_bytes = len(file.readline(_MAX_RECORD_BYTES))
        number = 1
        while line := file.readline(_MAX_RECORD_BYTES + 1):
            number += 1
            num_bytes += len(_limited(line, f"line {number}"))
            if num_bytes > _MAX_FILE_BYTES:
                raise ValueError(f"line {number} is beyond {_MAX_FILE_BYTES} bytes")
            if line.endswith(b"\n"):
                yield f"line {number}", line


def _limited(data: bytes, what: str) -> bytes:
    if len(data) > _MAX_RECORD_BYTES:
        raise ValueError(f"{what} is longer than {_MAX_RECORD_BYTES} bytes")
    return data


def _is_archive(path: Path) -> bool:
    with _unpacked_file(path) as file:
        try:
            tarfile.open(fileobj=file, mode="r|", tarinfo=_TarInfo).close()
        except tarfile.ReadError:
            return False
        return True


def _members(file: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """The files of an archive, one after the other."""
    with tarfile.open(fileobj=file, mode="r|", tarinfo=_TarInfo) as archive:
        for number, member in enumerate(archive):
            if number == _MAX_MEMBERS:
                raise tarfile.ReadError(f"the archive has more than {_MAX_MEMBERS} members")
            if member.size > _MAX_RECORD_BYTES or member.offset > _MAX_FILE_BYTES:
                raise tarfile.ReadError(f"{member.name} is too large to read from an archive")
            if member.isreg() and (data := archive.extractfile(member)) is not None:
                yield Path(member.name).name, data.read()


class _TarInfo(tarfile.TarInfo):
    """A member's header; raises when a header block other than a file's exceeds the limit."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_TarInfo":
        info = super().frombuf(buf, encoding, errors)
        # tarfile reads names and attributes that are too long for a header as a whole.
        if not info.isfile() and info.size > _MAX_TAR_HEADER_BYTES:
            raise tarfile.ReadError("the archive has a member header that is too long")
        return info


def _unpacked_file(path: Path) -> AbstractContextManager[BinaryIO]:
    return _unpacked(path.open("rb"))


def _unpacked_bytes(data: bytes) -> AbstractContextManager[BinaryIO]:
    return _unpacked(io.BytesIO(data))


@contextmanager
def _unpacked(file: BinaryIO) -> Iterator[BinaryIO]:
    """A file's content, unpacked if compressed; closes the file."""
    with file:
        magic = file.read(6)
        file.seek(0)
        if magic.startswith(b"\x1f\x8b"):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield cast("BinaryIO", unpacked)
        elif magic.startswith(b"BZh"):
            with bz2.BZ2File(file) as unpacked:
                yield cast("BinaryIO", unpacked)
        elif magic == b"\xfd7zXZ\x00":
            with io.BufferedReader(_XzFile(file)) as unpacked:
                yield unpacked
        else:
            yield file


class _XzFile(io.RawIOBase):
    """Unpacks .xz with a memory limit: a file's header may ask for a dictionary of any size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._unpacker = lzma.LZMADecompressor(memlimit=_MAX_XZ_MEMORY_BYTES)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        while not self._unpacker.eof:
            data = self._file.read(_CHUNK_BYTES) if self._unpacker.needs_input else b""
            if self._unpacker.needs_input and not data:
                raise EOFError("the compressed data end in the middle")
            if unpacked := self._unpacker.decompress(data, len(view)):
                view[: len(unpacked)] = unpacked
                return len(unpacked)
        return 0
