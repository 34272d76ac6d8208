"""Steps on a terminal and elsewhere."""

import io

import pytest

from headrace.cli.progress import ProgressSteps
from headrace.service.model_files import Progress


class Screen(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self):
        return self._is_terminal


def show(monkeypatch, is_terminal, story):
    screen = Screen(is_terminal)
    monkeypatch.setattr("sys.stderr", screen)
    with ProgressSteps() as steps:
        story(steps)
    return screen.getvalue()


def story(steps):
    steps.fetched(Progress("downloading m", 0, 93_000_000))
    steps.fetched(Progress("downloading m", 46_500_000, 93_000_000))
    steps.begin("loading m")
    steps.log("[gpuworker] a word")


def test_elsewhere_each_step_is_one_plain_line(monkeypatch):
    text = show(monkeypatch, False, story)
    assert text == "  downloading m  0.0 s\n[gpuworker] a word\n  loading m  0.0 s\n"


def test_a_terminal_sees_a_live_line(monkeypatch):
    text = show(monkeypatch, True, story)
    assert "downloading m ... 46 of 93 MB" in text
    assert text.endswith("\r\x1b[K  loading m  0.0 s\n")
    assert "\r\x1b[K[gpuworker] a word\n  loading m ..." in text


def test_a_step_tells_how_far_it_is_and_stays_one(monkeypatch):
    def story(steps):
        steps.begin("loading m")
        for part in ("reading", "reading: 1 of 2", "reading: 2 of 2"):
            steps.begin(part)

    assert show(monkeypatch, False, story) == "  loading m  0.0 s\n  reading: 2 of 2  0.0 s\n"
    assert "\r\x1b[K  reading: 1 of 2 ...\r\x1b[K  reading: 2 of 2 ..." in show(
        monkeypatch, True, story
    )


def test_a_step_that_failed_is_not_called_done(monkeypatch):
    def fail(steps):
        steps.begin("loading m")
        raise KeyError

    screen = Screen(True)
    monkeypatch.setattr("sys.stderr", screen)
    with pytest.raises(KeyError), ProgressSteps() as steps:
        fail(steps)
    assert screen.getvalue().endswith("  loading m ...\n")
