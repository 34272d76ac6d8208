"""Which runs of the tests get a second try in CI."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parent.parent.parent / ".ci" / "second_try.py"
SPEC = importlib.util.spec_from_file_location("second_try", FILE)
second_try = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(second_try)

ENDS = "FAILED tests/a.py::b - TimeoutError\n{} in 772.52s (0:12:52)\nmake: *** [test] Error 1\n"


@pytest.mark.parametrize(
    ("summary", "last_failed"),
    [
        ("1 failed, 3939 passed, 37 skipped", ["b"]),
        ("1 failed, 3939 passed, 37 skipped, 1 error", ["b", "c"]),
        ("3939 passed, 37 skipped, 2 errors", ["b", "c"]),
        # A test that failed in its teardown too is named once.
        ("2 failed, 3939 passed, 1 error", ["b", "c"]),
    ],
)
def test_a_few_failures_of_a_whole_run_are_tried_again(summary, last_failed):
    assert second_try.refusal(ENDS.format(summary), last_failed) is None


@pytest.mark.parametrize(
    ("log", "last_failed"),
    [
        (ENDS.format("5 failed, 3939 passed"), list("abcde")),
        (ENDS.format("1 failed, 3939 passed"), ["a", "b"]),
        (ENDS.format("1 failed, 3939 passed"), []),
        (ENDS.format("3940 passed"), []),
        ("!!!!! KeyboardInterrupt !!!!!\n" + ENDS.format("1 failed, 200 passed"), ["b"]),
        ("[gw0] node down: Not properly terminated\n" + ENDS.format("1 failed, 9 passed"), ["b"]),
        ("INTERNALERROR> Traceback", ["b"]),
        ("", ["b"]),
    ],
)
def test_nothing_else_is_tried_again(log, last_failed):
    assert second_try.refusal(log, last_failed) is not None


def test_the_second_try_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / ".pytest_cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text('{"tests/a.py::b": true}')
    (tmp_path / "log").write_text(ENDS.format("1 failed, 3939 passed"))
    monkeypatch.setattr("sys.argv", ["second_try.py", "log"])
    second_try.main()
    assert "tests/a.py::b" in capsys.readouterr().out
