"""Writes a core's inputs and decisions to files that `headrace replay` reads.

A thread writes; the event loop never waits for the disk. When a file is full, the next file begins
in the middle of the run: each file begins with the core's state and replays by itself. Files hold
prompts, as token ids.

With a disk that is too slow, steps are dropped: while more than `max_waiting_bytes` are unwritten,
no step is recorded, and once everything is written a new file begins. A disk error (disk full,
folder missing) ends the recording. Serving continues in both cases, and a warning is logged.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from scheduler.core.plan import SchedulerConfig
from scheduler.replay.recorder import Recorder
from scheduler.replay.trace import TraceRecord

logger = logging.getLogger(__name__)

# The free list's checksum costs a pass over the list; above this length records omit it.
_MAX_CRC_BLOCKS = 4096
_NUM_OLD_FILES = 3
_MAX_WAITING_BYTES = 64 << 20
_CLOSE_TIMEOUT_S = 5.0


class Recording:
    """One engine's recording; `recorder` is the core that the engine drives."""

    def __init__(
        self,
        config: SchedulerConfig,
        path: Path,
        *,
        max_bytes: int,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
    ) -> None:
        """Rotates older files: PATH to PATH.1, PATH.1 to PATH.2 and so on; the oldest is deleted.

        Args:
            config: the core's settings.
            path: the newest file.
            max_bytes: a file of this size is rotated.
            max_waiting_bytes: while more bytes are unwritten, steps are dropped.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._num_file_bytes = 0
        self._num_left_out = 0
        self._writer = _FileWriter(path)
        self.recorder = Recorder(config, self._take, max_crc_blocks=_MAX_CRC_BLOCKS)
        self._begin_file()

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes not written yet, which a kill of this process would lose."""
        return self._writer.num_waiting_bytes

    async def close(self) -> None:
        """Finish the last step's record and the file; waits at most 5 s for a stuck disk."""
        self.recorder.end_step()
        if not await asyncio.to_thread(self._writer.close, _CLOSE_TIMEOUT_S):
            logger.warning("recording to %s is cut off: the disk does not take it", self._path)

    def _take(self, record: TraceRecord) -> None:
        if self._writer.has_failed:
            self.recorder.stop()
        elif self._num_left_out:
            self._catch_up()
        elif self._writer.num_waiting_bytes > self._max_waiting_bytes:
            logger.warning("recording to %s leaves out steps: the disk is too slow", self._path)
            self._leave_out()
        else:
            self._write(record, begins_file=False)
            if self._num_file_bytes >= self._max_bytes:
                self._begin_file()

    def _catch_up(self) -> None:
        """Begin a new file, with the state after this step, once everything is written."""
        if self._writer.num_waiting_bytes:
            self._leave_out()
            return
        logger.warning(
            "recording to %s goes on in a new file; %d steps are left out",
            self._path,
            self._num_left_out + 1,
        )
        self._num_left_out = 0
        self._begin_file()

    def _leave_out(self) -> None:
        self._num_left_out += 1
        self.recorder.forget_names()

    def _begin_file(self) -> None:
        self._num_file_bytes = 0
        self._write(self.recorder.header(self._path.stem), begins_file=True)

    def _write(self, record: TraceRecord, *, begins_file: bool) -> None:
        line = msgspec.json.encode(record) + b"\n"
        self._num_file_bytes += len(line)
        self._writer.put(line, begins_file=begins_file)


class _Line(NamedTuple):
    data: bytes
    begins_file: bool


class _FileWriter:
    """A thread that writes lines in order; written lines have reached the operating system."""

    def __init__(self, path: Path) -> None:
        self.has_failed = False
        self._path = path
        self._lines: queue.SimpleQueue[_Line | None] = queue.SimpleQueue()
        # One thread changes each counter: the owner the first, the writer thread the second.
        self._num_put_bytes = 0
        self._num_written_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"record {path}", daemon=True)
        self._thread.start()

    @property
    def num_waiting_bytes(self) -> int:
        return self._num_put_bytes - self._num_written_bytes

    def put(self, data: bytes, *, begins_file: bool) -> None:
        """Queue a line to be written, in a new file if `begins_file`."""
        self._num_put_bytes += len(data)
        self._lines.put(_Line(data, begins_file))

    def close(self, timeout_s: float) -> bool:
        """Write all queued lines and end the thread; False after the timeout."""
        self._lines.put(None)
        self._thread.join(timeout_s)
        if is_stuck := self._thread.is_alive():
            self.has_failed = True  # the thread writes no further line
        return not is_stuck

    def _run(self) -> None:
        file: BinaryIO | None = None
        try:
            while (line := self._lines.get()) is not None and not self.has_failed:
                if line.begins_file or file is None:
                    if file is not None:
                        file.close()
                    file = _fresh(self._path)
                file.write(line.data)
                if self._lines.empty():
                    file.flush()
                self._num_written_bytes += len(line.data)
        except OSError as error:
            logger.warning("cannot record to %s: %s", self._path, error)
            self.has_failed = True
            self._lines = queue.SimpleQueue()
        finally:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def path_for(path: Path, worker_id: str, *, is_only_worker: bool) -> Path:
    """The file of one worker: PATH if there is only one worker, else PATH-WORKER."""
    if is_only_worker:
        return path
    name = "".join(c if c.isalnum() or c in "-_." else "_" for c in worker_id)
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


def _fresh(path: Path) -> BinaryIO:
    """Rotates older files and opens an empty file at the path."""
    for number in range(_NUM_OLD_FILES, 0, -1):
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            newer.replace(path.with_name(f"{path.name}.{number}"))
    return path.open("wb")
