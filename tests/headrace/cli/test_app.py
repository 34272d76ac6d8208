"""The command itself: help, usage, exit codes."""

import re
import subprocess
import sys
import time

import pytest

from headrace.cli.app import _COMMANDS, main
from headrace.cli.exits import explained
from headrace.service.errors import unauthenticated
from headrace.service.model_files import CATALOG


def test_help_lists_every_command_with_a_line(headrace):
    result = headrace("--help")
    assert result.exit_code == 0
    for name, line in _COMMANDS.items():
        assert name in result.output
        assert line in result.output
    assert re.search(r"^ +replay +Replay recorded runs", result.output, re.MULTILINE)
    assert "Exit codes" in result.output


@pytest.mark.parametrize("name", [*_COMMANDS, "replay"])
def test_every_command_has_help_and_its_name(headrace, name):
    result = headrace(name, "--help")
    assert result.exit_code == 0, result.output
    assert main.get_command(None, name).name == name


@pytest.mark.parametrize("name", CATALOG)
def test_a_built_in_model_is_in_the_help_of_what_serves_it(headrace, name):
    for command in ("serve", "demo"):
        assert name in headrace(command, "--help").output


def test_an_unknown_command_or_option_is_wrong_usage(headrace):
    for arguments in (["frobnicate"], ["generate", "--frobnicate"], ["status"]):
        result = headrace(*arguments)
        assert result.exit_code == 2
        assert "Traceback" not in result.output


def test_a_mistyped_command_is_guessed(headrace):
    assert "did you mean 'generate'?" in headrace("genrate", "hi").stderr
    assert "did you mean 'replay'?" in headrace("repaly", "file").stderr


@pytest.mark.parametrize("server", ["localhost", "localhost:99999", "localhost:http", "a:0"])
def test_a_server_without_a_real_port_is_wrong_usage(headrace, server):
    result = headrace("pool", "--server", server)
    assert result.exit_code == 2
    assert "write HOST:PORT" in result.stderr


def test_the_version_is_told(headrace):
    assert headrace("--version").stdout.startswith("headrace")


IMPORTED = """
import sys
from headrace.cli.app import main
try:
    main(["--help"])
except SystemExit:
    pass
heavy = {"grpc", "redis", "msgspec", "numpy", "asyncio", "opentelemetry"} & set(sys.modules)
sys.exit(" ".join(heavy) or 0)
"""


def test_help_is_there_at_once_because_nothing_heavy_is_imported():
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTED], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, heavy = process.communicate(timeout=20)
    assert (process.returncode, heavy) == (0, b"")


@pytest.mark.system
def test_help_takes_little_more_than_python_and_its_library_for_commands(command):
    def took(start):
        begin = time.perf_counter()
        start().communicate()
        return time.perf_counter() - begin

    def bare():
        return subprocess.Popen([sys.executable, "-c", "import click"])

    pairs = [(took(bare), took(lambda: command("--help"))) for _ in range(8)]
    floor, help_s = (min(times) for times in zip(*pairs, strict=True))
    assert help_s < 4 * floor, "grpc alone is more"


@pytest.mark.system
def test_a_closed_pipe_ends_help_quietly(command):
    process = command("--help")
    process.stdout.close()
    process.wait(10)
    assert process.returncode in {0, 141}
    assert process.stderr.read() == b""


def test_no_server_is_exit_code_3_and_says_what_to_do(headrace, unused_tcp_port):
    for arguments in (["generate", "hi"], ["models"], ["abort", "x"], ["status", "x"]):
        result = headrace(*arguments, "--server", f"127.0.0.1:{unused_tcp_port}")
        assert result.exit_code == 3, result.output
        assert "headrace serve" in result.stderr
        assert "--server" in result.stderr
        assert result.stderr.count("\n") == 1


def test_a_refused_token_names_the_flag():
    failure = explained(unauthenticated("BAD_TOKEN", "send metadata"))
    assert failure.exit_code == 1
    assert "--auth-token-file" in failure.message


def test_a_token_file_that_is_not_there_is_one_clear_line(headrace):
    result = headrace("models", "--auth-token-file", "/no/such/token")
    assert result.exit_code == 2
    assert "/no/such/token" in result.stderr
