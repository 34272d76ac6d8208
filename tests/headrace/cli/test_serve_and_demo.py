"""`headrace serve` and `demo` as real processes; the services are stand-ins."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.system

STAND_IN = """
import runpy, sys
sys.argv.insert(1, {name!r})
runpy.run_module("tests.headrace.fake_service", run_name="__main__", alter_sys=False)
"""


@pytest.fixture
def start(tmp_path):
    """Starts the command with stand-in services and a model file that is one by name only."""
    for name in ("gpuworker", "scheduler", "router"):
        (tmp_path / f"{name}.py").write_text(STAND_IN.format(name=name))
    (tmp_path / "fake.gguf").write_bytes(b"GGUF")
    path = os.pathsep.join([str(tmp_path), str(Path.cwd())])
    started = []

    def run(*arguments, **environment):
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", *arguments, "--model", str(tmp_path / "fake.gguf")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path} | environment,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def read_until(stream, text):
    lines = []
    while text not in (line := stream.readline()):
        assert line, "".join(lines)
        lines.append(line)
    return "".join([*lines, line])


def test_serve_says_how_to_talk_to_it_and_stops_clean(start, headrace):
    process = start("serve", "--port", "0")
    said = read_until(process.stdout, "Ctrl-C stops it")
    address = re.search(r"Serving fake at (\S+)", said)[1]
    assert f"headrace chat --server {address}" in said
    assert headrace("generate", "hi", "--server", address).stdout == "hi\n"
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert re.search(r"loading fake +\d+\.\d s\n", errors)
    assert not [child for child in children if child.is_running()]


@pytest.mark.parametrize(
    ("port", "arguments", "is_kept"),
    [(None, [], True), (None, ["--ephemeral"], False), (0, [], False)],
)
def test_records_are_kept_for_a_model_and_port_unless_told_otherwise(
    start, tmp_path, unused_tcp_port, port, arguments, is_kept
):
    port = unused_tcp_port if port is None else port
    process = start(
        "serve", "--port", str(port), *arguments, XDG_STATE_HOME=str(tmp_path / "state")
    )
    read_until(process.stdout, "Ctrl-C stops it")
    process.terminate()
    process.communicate(timeout=20)
    folder = tmp_path / "state" / "headrace" / f"store-fake-{port}" / "appendonlydir"
    assert folder.is_dir() is is_kept
    assert (tmp_path / "state").exists() is is_kept


def test_ephemeral_goes_with_no_other_place_for_the_records(headrace):
    for other in (("--data-dir", "here"), ("--store-url", "redis://there")):
        result = headrace("serve", "--ephemeral", *other)
        assert result.exit_code == 2
        assert "--ephemeral goes with neither" in result.stderr


def test_a_data_folder_is_refused_where_no_embedded_store_is_started(headrace):
    for url in ("", "redis://there"):
        result = headrace("serve", "--data-dir", "here", "--store-url", url)
        assert result.exit_code == 2
        assert "--data-dir is of the embedded store" in result.stderr


def test_ctrl_c_stops_serve_with_success(start):
    process = start("serve", "--port", "0", "--store-url", "")
    read_until(process.stdout, "Ctrl-C stops it")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_serve_passes_its_options_to_the_services(start, tmp_path):
    (tmp_path / "all.toml").write_text("")
    process = start(
        *("serve", "--port", "0", "--store-url", "", "--device", "cpu", "--num-kv-blocks", "64"),
        *("--max-model-len", "512", "--log-level", "info", "--config", str(tmp_path / "all.toml")),
    )
    read_until(process.stdout, "Ctrl-C stops it")
    process.terminate()
    _, errors = process.communicate(timeout=20)
    worker = next(line for line in errors.splitlines() if "[gpuworker] pid" in line)
    for flag in ("--device cpu", "--num-kv-blocks 64", "--max-model-len 512", "--log-level info"):
        assert flag in worker
    assert errors.count("all.toml") == 3
    assert "status store" not in errors


def test_serve_lets_the_config_file_say_what_no_flag_says(start, tmp_path, headrace):
    (tmp_path / "token").write_text("secret\n")
    file = tmp_path / "all.toml"
    file.write_text(
        f"[serving]\nauth_token_file = '{tmp_path / 'token'}'\ndrain_timeout_s = 7\n"
        "[process]\nlog_level = 'info'\n"
    )
    process = start("serve", "--port", "0", "--store-url", "", "--config", str(file))
    said = read_until(process.stdout, "Ctrl-C stops it")
    command = re.search(r"headrace (chat .*)", said)[1].split()
    assert headrace(*command, stdin="hi\n").stdout == "hi\n"
    process.terminate()
    _, errors = process.communicate(timeout=20)
    assert errors.count("--drain-timeout-s 7.0") == 3
    assert "--log-level" not in errors, "the file's to say"


def test_a_file_that_is_not_there_is_said_before_anything_starts(start):
    process = start(
        *("serve", "--port", "0", "--tls-cert-file", "none.pem", "--tls-key-file", "none.pem")
    )
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors.count("\n")) == (2, 1)
    assert errors.startswith("Error: cannot read none.pem")


def test_serve_explains_a_service_that_does_not_start(start):
    process = start("serve", "--port", "0", FAKE_GPUWORKER="crash")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "[gpuworker] out of memory, or so" in errors
    assert errors.endswith("Error: gpuworker ended (1); its log is above\n")
    assert "Traceback" not in errors


def test_a_port_that_is_taken_is_said_before_anything_starts(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, errors = (process := start("serve", "--port", str(port))).communicate(timeout=20)
    assert process.returncode == 1
    assert errors.startswith(f"Error: cannot listen on 127.0.0.1:{port} (")
    assert errors.count("\n") == 1


def test_serve_says_that_a_service_died_and_is_back(start, headrace):
    process = start("serve", "--port", "0", "--store-url", "")
    said = read_until(process.stdout, "Ctrl-C stops it")
    address = re.search(r"Serving fake at (\S+)", said)[1]
    errors = read_until(process.stderr, "[router] store")
    os.kill(int(re.search(r"\[router\] pid (\d+)", errors)[1]), signal.SIGKILL)
    read_until(process.stderr, "router was killed by SIGKILL; starting it again")
    read_until(process.stderr, "router is back after")
    assert headrace("generate", "hi", "--server", address).stdout == "hi\n"
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 0


def test_serve_ends_with_the_reason_when_a_service_keeps_dying(start):
    process = start("serve", "--port", "0", "--store-url", "")
    read_until(process.stdout, "Ctrl-C stops it")
    for _ in range(5):
        said = read_until(process.stderr, "[gpuworker] pid")
        os.kill(int(re.search(r"\[gpuworker\] pid (\d+)", said)[1]), signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Error: gpuworker was killed by SIGKILL; started 5 times" in errors
    assert "Traceback" not in errors


def test_an_unknown_model_is_one_clear_line():
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "headrace",
            "serve",
            "--port",
            "0",
            "--model",
            "smollm2-135m-instuct",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "did you mean smollm2-135m-instruct?" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_model_that_cannot_chat_is_given_text_by_the_demo(start):
    process = start("demo", "--prompt", "to be or not", FAKE_NO_CHAT_TEMPLATE="1")
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    assert output.strip().startswith("> to be or not\n\nto be or not")


def test_demo_streams_an_answer_and_figures_and_leaves_nothing(start):
    process = start("demo", "--prompt", "to be or not")
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 0, errors
    answer, figures = output.strip().rsplit("\n\n", 1)
    assert answer == "> to be or not\n\nto be or not"
    parts = ("4 tokens in .* s: TTFT .* ms", "TPOT .* ms", ".* tokens/s", "4 of 5 drafts right")
    assert re.fullmatch(", ".join(parts), figures)
    for step in ("starting the status store", "loading fake", "stopping"):
        assert re.search(rf"  {step}  \d+\.\d s\n", errors)


def test_ctrl_c_in_the_demo_stops_everything(start):
    process = start("demo", "--prompt", "to hang")
    read_until(process.stdout, "> to hang")
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    # gRPC itself may print one in a server that stops with a call open.
    assert not [line for line in errors.splitlines() if line.startswith("Traceback")], errors
    assert not [child for child in children if child.is_running()]
