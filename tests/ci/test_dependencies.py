"""The check of requirements.lock that `make check` runs."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SPEC = importlib.util.spec_from_file_location("dependencies", ROOT / ".ci" / "dependencies.py")
dependencies = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(dependencies)

LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_lock_is_sound():
    assert dependencies.complaints(LOCK, PROJECT) == []


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ("\nmsgspec==", "\nmsgspec>=", "not NAME==VERSION: 'msgspec>="),
        ("\nmsgspec==", "\nother==", "missing: msgspec, which pyproject.toml needs"),
        # Of a dependency: jinja2 needs markupsafe.
        ("\nMarkupSafe==", "\nother==", "which jinja2 needs"),
        ("\nmsgspec==", "\nmsgspec==0.1\nmsgspec==", "twice: msgspec"),
        ("\nredis==8.1.0", "\nredis==1.0", "redis==1.0: pyproject.toml needs"),
    ],
)
def test_what_is_wrong_with_a_lock_is_named(before, after, complaint):
    assert before in LOCK
    found = dependencies.complaints(LOCK.replace(before, after, 1), PROJECT)
    assert any(complaint in text for text in found), found
