"""Folders that only we can enter and that are cleared up even after a kill -9."""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "headrace-"
_LOCK = "owner.lock"
# The path of a socket has 104 bytes at most (macOS; 108 on Linux), our part of it 40.
_MAX_BASE_BYTES = 60


@contextlib.contextmanager
def private_dir() -> Iterator[Path]:
    """A new folder (mode 0700, its path short enough for sockets) that is removed at the end.

    Its owner holds a lock inside, which the kernel drops when the owner dies in whatever way;
    so each new owner can tell what dead ones left, and removes it.
    """
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > _MAX_BASE_BYTES:
        base = Path("/tmp")  # noqa: S108 mkdtemp makes a folder there that is only ours
    _remove_abandoned(base)
    # Hidden until it is locked: others remove what has our prefix and no owner.
    draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
    lock = os.open(draft / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    folder = draft.rename(base / draft.name.removeprefix("."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_abandoned(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        # Another user's cannot be entered, and one that is just being removed is not there.
        with contextlib.suppress(OSError):
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Removes one of our folders whose owner is dead.

    Raises:
        OSError: it has an owner, is not ours, or is gone.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    # Without a lock file it is another program's.
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
