"""Writes what an engine's core is given and decides to a file that `headrace replay` reads.

A recording begins with an empty core, so a file that is full cannot simply be followed by the
next: recording stops until the engine is idle and starts afresh. Files hold prompts, as tokens.
"""

import json
import logging
from pathlib import Path
from typing import Any

from scheduler.core.recording import Recorder
from scheduler.core.scheduler import SchedulerCore
from scheduler.core.trace import header

logger = logging.getLogger(__name__)

# Digesting the free list costs a pass over it; with more blocks it is left out of the records.
_MAX_CRC_BLOCKS = 4096
_NUM_OLD_FILES = 3


class Recording:
    """One engine's recording; `recorder` is driven in place of the core while not `is_full`."""

    def __init__(self, core: SchedulerCore, path: Path, *, max_bytes: int) -> None:
        """Moves an older file to PATH.1, that one to PATH.2 and so on; the oldest is dropped.

        Raises:
            OSError: the file cannot be written.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        _make_room(path)
        # Line by line, so that a kill leaves all but the step it interrupts.
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self.recorder = Recorder(core, self._write, max_crc_blocks=_MAX_CRC_BLOCKS)
        self._write(header(core.config, path.stem))

    @property
    def is_full(self) -> bool:
        """Whether the file has all it may have; nothing more is written then."""
        return self._num_bytes >= self._max_bytes

    def close(self) -> None:
        """Finish the last step's record and the file."""
        if not self._file.closed:
            self.recorder.end_step()
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")) + "\n"
        try:
            self._file.write(line)
            self._num_bytes += len(line)
        except OSError as error:
            # A full disk ends the recording, not the serving.
            logger.warning("cannot go on recording to %s: %s", self._path, error)
            self._num_bytes = self._max_bytes


def path_for(path: Path, worker_id: str, *, is_only_worker: bool) -> Path:
    """The file of one worker: PATH itself if there is one worker, else PATH-WORKER."""
    if is_only_worker:
        return path
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in worker_id)
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


def _make_room(path: Path) -> None:
    for number in range(_NUM_OLD_FILES, 0, -1):
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            newer.replace(path.with_name(f"{path.name}.{number}"))
