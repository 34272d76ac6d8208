"""A scripted router in a process of its own, and two ways to use the command."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from headrace.cli.app import main


@pytest.fixture(scope="session")
def server():
    """Address of a fake router."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.headrace.fake_inference"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"FAKE_ORPHAN_TTL_S": "0.5"},
    )
    yield process.stdout.readline().strip()
    process.stdin.close()
    assert process.wait(10) == 0
    process.stdout.close()


@pytest.fixture
def headrace(server, monkeypatch):
    """Runs the command inside this process."""
    monkeypatch.setenv("HEADRACE_SERVER", server)
    return lambda *arguments, stdin=None: CliRunner().invoke(main, arguments, input=stdin)


@pytest.fixture
def command(server, monkeypatch):
    """Starts the command as a real process with pipes."""
    monkeypatch.setenv("HEADRACE_SERVER", server)
    started = []

    def start(*arguments, **options):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments], **(pipes | options)
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
