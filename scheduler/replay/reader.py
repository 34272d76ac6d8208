"""Reads recorded runs from files: JSON traces, recordings, archives of traces."""

import gzip
import json
import lzma
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from scheduler.replay.trace import Record, assemble

_UNPACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
}


def read_traces(path: Path) -> Iterator[tuple[str, Record]]:
    """The traces in a file, by name: one, or those of a tar archive.

    Raises:
        ValueError: it holds something else.
    """
    if not tarfile.is_tarfile(path):
        yield path.name, _trace(str(path), path.suffix, path.read_bytes())
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                name = Path(member.name)
                yield name.name, _trace(f"{path}: {member.name}", name.suffix, file.read())


def _trace(name: str, suffix: str, data: bytes) -> Record:
    """One JSON object, or a recording with one record a line."""
    try:
        text = _UNPACKERS.get(suffix, bytes)(data).decode()
    except (UnicodeDecodeError, OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{name} is no trace: {error}") from error
    try:
        trace: Any = json.loads(text)
    except json.JSONDecodeError:
        lines = text.splitlines()
        if lines and not text.endswith("\n"):
            # The last line of a recording that is still written, or was cut off.
            lines.pop()
        try:
            trace = assemble([json.loads(line) for line in lines])
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} is no trace: {error!r}") from error
    if isinstance(trace, dict) and "config" in trace and "steps" not in trace:
        # A recording's head, alone: nothing has been asked of that scheduler since.
        raise ValueError(f"{name}: no step is recorded in it yet")
    if not isinstance(trace, dict) or not {"config", "steps", "requests"} <= trace.keys():
        raise ValueError(f"{name} is no trace: it lacks config, requests or steps")
    return trace
