"""Private folders of running processes; folders of dead processes are removed by later ones."""

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
# A socket's path has at most 104 bytes on macOS and 108 on Linux; names below the base take 40.
_MAX_BASE_BYTES = 60


@contextlib.contextmanager
def private_dir() -> Iterator[Path]:
    """A new folder of mode 0700, with a path short enough for sockets; removed at the end.

    The owner holds a lock on a file in the folder. The kernel releases the lock when the owner
    dies, so the next owner can tell abandoned folders, and removes them.
    """
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > _MAX_BASE_BYTES:
        base = Path("/tmp")  # noqa: S108 mkdtemp makes a folder of mode 0700 there
    _remove_abandoned(base)
    # Another name until the lock is held: other processes remove unlocked folders of this prefix.
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
        # Folders of other users cannot be entered, and a folder may be removed meanwhile.
        with contextlib.suppress(OSError):
            _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    """Removes a folder of this user whose owner is dead.

    Raises:
        OSError: the folder has a living owner, is another user's, or is gone.
    """
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    # A folder without a lock file is another program's.
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
