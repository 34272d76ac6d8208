"""Folders that only we can enter and that are cleared up even after a kill -9."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "headrace-"
_LOCK = "owner.lock"


@contextlib.contextmanager
def private_dir() -> Iterator[Path]:
    """A new folder (mode 0700, short path) that is removed at the end.

    Its owner holds a lock inside, which the kernel drops when the owner dies in whatever way;
    so each new owner can tell what dead ones left, and removes it.
    """
    base = Path(tempfile.gettempdir())
    _remove_abandoned(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = _locked(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _locked(folder: Path) -> int | None:
    """The folder's lock, held by the caller until closed; None: somebody else's."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        # Without a lock file it is another program's, or its owner is only just making it.
        if not (folder / _LOCK).exists() or folder.stat().st_uid != os.getuid():
            continue
        with contextlib.suppress(OSError):
            lock = _locked(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)
