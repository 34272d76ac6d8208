"""Values that are read from files, and read again when the files change.

A change is found when the value is asked for, so neither a thread nor a task watches. Kubernetes
replaces the files of a Secret all at once by a symbolic link, which changes their inodes.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from headrace.service.config import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CHECK_S = 1.0

_Signature = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[T]):
    """The value of some files. Files that cannot be read any more leave the last good value.

    May be used from any thread.
    """

    def __init__(self, files: Sequence[str], read: Callable[[], T]) -> None:
        """read makes the value, or raises ConfigError, which the first time reaches the caller."""
        self._files = [Path(file) for file in files if file]
        self._read = read
        self._lock = threading.Lock()
        # Before the files are read: a change in between is found by the next check.
        self._seen = self._reported = self._signature()
        self._value = read()
        self._check_at = time.monotonic() + _CHECK_S

    def get(self) -> T:
        """The value, at most a second older than the files."""
        with self._lock:
            if time.monotonic() >= self._check_at:
                self._check()
                self._check_at = time.monotonic() + _CHECK_S
            return self._value

    def _check(self) -> None:
        signature = self._signature()
        if signature == self._seen:
            return
        names = ", ".join(map(str, self._files))
        try:
            self._value = self._read()
        except ConfigError as error:
            # Files are read again at each check: of two files one may be written later.
            if signature != self._reported:
                logger.warning("%s changed and cannot be used: %s", names, error.message)
            self._reported = signature
            return
        self._seen = self._reported = signature
        logger.info("read %s again", names)

    def _signature(self) -> _Signature:
        """What changes with the content of the files; None for a file that is not there."""
        return tuple(_identify(file) for file in self._files)


def _identify(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
