"""Writes what an engine's core is given and decides to files that `headrace replay` reads.

A file that is full is followed by the next, in the middle of a run: each begins with the state to
go on from and replays by itself. Files hold prompts, as tokens.
"""

import json
import logging
from pathlib import Path
from typing import Any, TextIO

from scheduler.core.plan import SchedulerConfig
from scheduler.replay.recorder import Recorder

logger = logging.getLogger(__name__)

# Digesting the free list costs a pass over it; with more blocks it is left out of the records.
_MAX_CRC_BLOCKS = 4096
_NUM_OLD_FILES = 3


class Recording:
    """One engine's recording; `recorder` is the core that the engine drives."""

    def __init__(self, config: SchedulerConfig, path: Path, *, max_bytes: int) -> None:
        """Moves an older file to PATH.1, that one to PATH.2 and so on; the oldest is dropped.

        Args:
            config: the core's settings.
            path: the newest file.
            max_bytes: a file with as much is followed by the next.

        Raises:
            OSError: the file cannot be written.
        """
        self.has_failed = False
        self._path = path
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._file = _fresh(path)
        self.recorder = Recorder(config, self._take, max_crc_blocks=_MAX_CRC_BLOCKS)
        self._write(self.recorder.header(path.stem))

    def close(self) -> None:
        """Finish the last step's record and the file."""
        if not self._file.closed:
            self.recorder.end_step()
            self._file.close()

    def _take(self, record: dict[str, Any]) -> None:
        if self.has_failed:
            return
        try:
            self._write(record)
            if self._num_bytes >= self._max_bytes:
                self._file.close()
                self._file = _fresh(self._path)
                self._num_bytes = 0
                self._write(self.recorder.header(self._path.stem))
        except OSError as error:
            # A full disk ends the recording, not the serving.
            logger.warning("cannot go on recording to %s: %s", self._path, error)
            self.has_failed = True

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, separators=(",", ":")) + "\n"
        self._file.write(line)
        self._num_bytes += len(line)


def path_for(path: Path, worker_id: str, *, is_only_worker: bool) -> Path:
    """The file of one worker: PATH itself if there is one worker, else PATH-WORKER."""
    if is_only_worker:
        return path
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in worker_id)
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


def _fresh(path: Path) -> TextIO:
    """The file, empty; older ones have made room for it."""
    for number in range(_NUM_OLD_FILES, 0, -1):
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            newer.replace(path.with_name(f"{path.name}.{number}"))
    # Line by line, so that a kill leaves all but the step it interrupts.
    return path.open("w", buffering=1, encoding="utf-8")
