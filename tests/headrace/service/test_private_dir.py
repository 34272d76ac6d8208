"""Private folders beside those of other users, of dead owners, and of owners that begin or end."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.service import private_dir as module
from headrace.service.private_dir import private_dir

OTHER_UID = 65534

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")


@pytest.fixture(autouse=True)
def base(monkeypatch, tmp_path_factory):
    """A place for such folders of its own, that others can enter."""
    # Made with the first use, and all later tests need it: it must not be in this place.
    tmp_path_factory.getbasetemp()
    # Not below pytest's own folder, which only we can enter.
    with tempfile.TemporaryDirectory(prefix="private-", dir="/tmp") as name:
        Path(name).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_a_folder_is_ours_alone_and_goes(base):
    with private_dir() as folder:
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not list(base.iterdir())


def test_what_a_dead_owner_left_is_removed_and_what_lives_is_not(base):
    with private_dir() as living:
        left = base / "headrace-dead"
        left.mkdir()
        (left / "owner.lock").touch()
        others = base / "headrace-something-else"
        others.mkdir()
        with private_dir():
            assert set(base.iterdir()) >= {living, others}
            assert not left.exists()


@needs_root
def test_another_users_folder_is_left_alone(base):
    with private_dir() as ours:
        # Imported first: the other user may not be able to read our checkout.
        code = (
            "import os, tempfile; from headrace.service.private_dir import private_dir;"
            f"os.setgid({OTHER_UID}); os.setuid({OTHER_UID}); tempfile.tempdir = {str(base)!r}\n"
            "with private_dir() as folder: print(folder)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
        assert (ran.returncode, ran.stderr) == (0, "")
        assert Path(ran.stdout.strip()).parent == base
        assert ours.exists()


@pytest.mark.parametrize("call", ["lstat", "open", "flock"])
def test_a_folder_may_vanish_while_we_look_at_it(base, monkeypatch, call):
    left = base / "headrace-dead"
    left.mkdir()
    (left / "owner.lock").touch()

    def vanishing(inner):
        def first(*args, **kwargs):
            shutil.rmtree(left, ignore_errors=True)
            return inner(*args, **kwargs)

        return first

    owner = {"lstat": Path, "open": os, "flock": fcntl}[call]
    monkeypatch.setattr(owner, call, vanishing(getattr(owner, call)))
    with private_dir() as folder:
        assert folder.exists()


@pytest.mark.parametrize("call", ["mkdtemp", "open", "flock"])
def test_nobody_clears_up_a_folder_that_is_being_made(base, monkeypatch, call):
    owner = {"mkdtemp": tempfile, "open": os, "flock": fcntl}[call]
    inner = getattr(owner, call)

    def then_another_clears_up(*args, **kwargs):
        result = inner(*args, **kwargs)
        monkeypatch.setattr(owner, call, inner)
        module._remove_abandoned(base)
        return result

    monkeypatch.setattr(owner, call, then_another_clears_up)
    with private_dir() as folder:
        module._remove_abandoned(base)
        assert (folder / "owner.lock").exists()


def test_a_link_to_a_folder_of_ours_is_not_followed(base, tmp_path):
    (tmp_path / "owner.lock").touch()
    (base / "headrace-link").symlink_to(tmp_path)
    with private_dir():
        assert (tmp_path / "owner.lock").exists()


def test_a_long_path_of_temporary_files_is_not_used(base, monkeypatch):
    deep = base / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with private_dir() as folder:
        assert len(os.fsencode(folder)) <= 60
