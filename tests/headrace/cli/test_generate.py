"""`headrace generate` in a process and as a process."""

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.headrace import fake_inference
from tests.headrace.tcp_proxy import TcpProxy
from tests.headrace.waiting import until


def test_prints_the_answer_and_a_newline(headrace):
    result = headrace("generate", "to be or not")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "to be or not\n", "")


@pytest.mark.parametrize("arguments", [["-"], []])
def test_reads_the_prompt_from_a_pipe_less_one_newline(headrace, arguments):
    result = headrace("generate", *arguments, stdin="hi\n\n")
    assert result.stdout == "hi\n"
    assert headrace("generate", *arguments, stdin="hi\n").stdout == "hi\n"


def test_json_has_the_whole_answer(headrace):
    result = headrace("generate", "a b", "--json", "--logprobs", "1", "--request-id", "mine-1")
    answer = json.loads(result.stdout)
    assert answer["request_id"] == "mine-1"
    (output,) = answer["outputs"]
    assert (output["text"], output["token_ids"]) == ("a b", [0, 1])
    assert (output["finish_reason"], output["matched_stop"]) == ("stop", "END")
    assert output["logprobs"][0]["top"] == [[0, -0.5], [9, -2.0]]
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 3}
    assert answer["usage"] == usage | {"draft_tokens": 5, "accepted_draft_tokens": 4}
    assert answer["figures"]["num_tokens"] == 2


def test_figures_go_to_stderr_so_that_pipes_stay_clean(headrace):
    result = headrace("generate", "a b c", "--figures")
    assert result.stdout == "a b c\n"
    assert "3 tokens in" in result.stderr
    assert "TTFT" in result.stderr
    assert "4 of 5 drafts right" in result.stderr


def test_several_completions_are_told_apart(headrace):
    assert headrace("generate", "a b", "-n", "2").stdout == "--- 1\na b\n--- 2\na b\n"


def test_a_system_message_means_chat(headrace):
    assert headrace("generate", "--system", "be brief", "hi").stdout == "hi\n"


def test_token_ids_are_numbers(headrace):
    result = headrace("generate", "--token-ids", "1 2 x")
    assert result.exit_code == 2
    assert "PROMPT" in result.stderr
    assert headrace("generate", "--token-ids", "--chat", "1").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["refuse"], 1, "sampling.temperature: must be >= 0, is -1 [INVALID_FIELD]"),
        (["full"], 1, "the queue is full; try again (again in 2 s) [QUEUE_FULL]"),
        (["hi", "--model", "gpt"], 1, "no model 'gpt'; served: fake [UNKNOWN_MODEL]"),
        (["hi", "--top-k", "-1"], 1, "top_k: "),
        (["hi", "--logit-bias", "x"], 2, "is not ID=VALUE"),
        (["hi", "--max-tokens", "many"], 2, "--max-tokens"),
    ],
)
def test_an_error_is_one_clear_line(headrace, arguments, code, text):
    result = headrace("generate", *arguments)
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_text_on_stdin_that_is_not_utf8_is_wrong_usage(headrace):
    result = headrace("generate", "-", stdin=b"caf\xe9")
    assert result.exit_code == 2
    assert "not UTF-8 text (byte 3)" in result.stderr


def state_of(headrace, request_id):
    result = headrace("status", request_id, "--json")
    return json.loads(result.stdout)["state"] if result.exit_code == 0 else None


def wait_for_state(headrace, request_id, state):
    end = time.monotonic() + 60
    while (now := state_of(headrace, request_id)) != state:
        assert time.monotonic() < end, f"is {now}, not {state}"
        time.sleep(0.05)


@pytest.mark.system
def test_text_comes_as_it_is_made(command):
    process = command("generate", "come here hang", "--request-id", "live")
    seen = process.stdout.read(len("come here hang"))
    assert seen == b"come here hang"


@pytest.mark.system
def test_ctrl_c_ends_the_request_on_the_server(command, headrace):
    process = command("generate", "wait hang", "--request-id", "ctrl-c")
    assert process.stdout.read(4) == b"wait"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    wait_for_state(headrace, "ctrl-c", "ABORTED")


@pytest.mark.system
def test_a_killed_client_ends_the_request_on_the_server(command, headrace):
    process = command("generate", "wait hang", "--request-id", "killed")
    assert process.stdout.read(4) == b"wait"
    process.kill()
    wait_for_state(headrace, "killed", "ABORTED")


@pytest.mark.system
def test_a_reader_that_leaves_ends_the_request(command, headrace):
    process = command("generate", "x flood", "--request-id", "head")
    head = subprocess.run(
        ["head", "-c", "10"], stdin=process.stdout, capture_output=True, check=True
    )
    assert len(head.stdout) == 10
    process.stdout.close()
    assert process.wait(10) == 141
    assert process.stderr.read() == b""
    wait_for_state(headrace, "head", "ABORTED")


@pytest.mark.system
def test_echo_into_a_pipe_of_two(server):
    shell = f"echo hi | {sys.executable} -m headrace generate - --server {server} | tr h H"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("Hi\n", "")


@pytest.mark.system
def test_a_terminal_without_unicode_still_gets_the_answer(command, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    output, errors = command("generate", "na\u00efve").communicate(timeout=20)
    assert (output, errors) == (b"na?ve\n", b"")


@pytest.mark.system
def test_a_server_that_dies_midway_is_unreachable_and_keeps_what_came():
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.headrace.fake_inference"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = server.stdout.readline().strip()
    client = subprocess.Popen(
        [
            *(sys.executable, "-m", "headrace", "generate", "last words hang"),
            *("--server", address, "--resume-timeout-s", "0.5"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # Killed once its words are here: a reset that comes with them may overtake them.
    words = b"last words hang"
    assert client.stdout.read(len(words)) == words
    server.kill()
    server.communicate()
    _, errors = client.communicate(timeout=20)
    assert client.returncode == 3
    assert b"Traceback" not in errors
    assert b"the connection was lost after 3 tokens, and the request did not go on" in errors


@pytest.fixture
async def router():
    """A fake router in this process, behind a proxy that can cut."""
    router, server, address = await fake_inference.start()
    async with TcpProxy(address) as proxy:
        router.proxy = proxy
        yield router
    await server.stop(0)


async def cut_at_the_gate(router, arguments, **options):
    """Runs the command, cuts its connection in mid-answer; what came on stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", *arguments, "--server", router.proxy.address), **options
    )
    await until(lambda: any(live.num_read >= 3 for live in router.live.values()))
    await router.proxy.cut()
    await until(lambda: router.resumed)
    router.gate.set()
    return process


@pytest.mark.system
@pytest.mark.parametrize("arguments", [["generate"], ["chat"]])
async def test_a_lost_connection_leaves_no_gap_in_the_text_and_is_said(router, arguments):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await cut_at_the_gate(router, [*arguments, "one two gate three four"], **pipes)
    output, errors = await process.communicate(b"")
    assert (process.returncode, output) == (0, b"one two gate three four\n")
    lost, back = errors.decode().splitlines()
    assert lost == f"(lost the connection to {router.proxy.address} (UNREACHABLE), resuming)"
    assert back.startswith("(resumed after ")


@pytest.mark.system
async def test_on_a_terminal_the_notes_are_dim_and_apart_from_the_answer(router):
    main, terminal = pty.openpty()
    process = await cut_at_the_gate(
        router, ["generate", "one two gate three"], stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    await process.wait()
    seen = os.read(main, 65536).decode()
    os.close(main)
    dim = r"\n\x1b\[2m\((.*)\)\x1b\[0m\n"
    begun, lost, nothing, back, rest = re.split(dim, seen.replace("\r\n", "\n"))
    assert not nothing
    assert begun + rest == "one two gate three\n"
    assert lost.startswith("lost the connection")
    assert back.startswith("resumed after")


async def test_a_second_router_of_the_list_takes_over(router, headrace, unused_tcp_port):
    servers = f"127.0.0.1:{unused_tcp_port},{router.proxy.address}"
    result = await asyncio.to_thread(headrace, "generate", "hi", "--server", servers)
    assert (result.stdout, result.stderr) == ("hi\n", "")


def test_a_request_can_be_read_again_from_any_token(headrace):
    headrace("generate", "one two three", "--request-id", "again")
    assert headrace("resume", "again").stdout == "one two three\n"
    assert headrace("resume", "again", "--from-token", "1").stdout == "two three\n"
    answer = json.loads(headrace("resume", "again", "--from-token", "2", "--json").stdout)
    assert answer["outputs"][0]["token_ids"] == [2]
    unknown = headrace("resume", "nobody")
    assert (unknown.exit_code, unknown.stdout) == (1, "")
    assert "[UNKNOWN_REQUEST]" in unknown.stderr


def test_of_several_completions_the_first_is_read_again(headrace):
    headrace("generate", "a b", "-n", "2", "--request-id", "both")
    result = headrace("resume", "both")
    assert result.stdout == "a b\n"
    assert result.stderr == "(the first of 2 completions; --json prints all)\n"
    assert len(json.loads(headrace("resume", "both", "--json").stdout)["outputs"]) == 2
