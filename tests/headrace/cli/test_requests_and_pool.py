"""`abort`, `status`, `explain`, `models`, `pool` and `top`."""

import json
import signal

import pytest


def test_abort_says_what_it_found_and_fails_for_the_unknown(headrace):
    headrace("generate", "hi", "--request-id", "over")
    result = headrace("abort", "over", "who")
    assert result.exit_code == 1
    assert result.stdout == "over  already finished\nwho  not found\n"
    assert "1 of 2 requests are not known" in result.stderr
    alone = headrace("abort", "over", "--json")
    assert alone.exit_code == 0
    assert json.loads(alone.stdout) == [{"request_id": "over", "result": "already finished"}]


def test_status_is_for_people_and_for_programs(headrace):
    headrace("generate", "hi", "--request-id", "told")
    lines = headrace("status", "told").stdout.splitlines()
    assert "state    STOPPED" in lines
    assert "tokens   7 prompt, 0 generated" in lines
    record = json.loads(headrace("status", "told", "--json").stdout)
    assert (record["state"], record["epoch"]) == ("STOPPED", 1)


def test_status_of_an_unknown_request_fails(headrace):
    result = headrace("status", "who")
    assert result.exit_code == 1
    assert "nothing is known of who [UNKNOWN_REQUEST]" in result.stderr


def test_explain_shows_steps_and_sums(headrace):
    text = headrace("explain", "r1").stdout
    assert "step 3-5          WAITED      place 1  waited for 3 steps: needs 12 KV blocks" in text
    assert "steps waited  3 for KV_BLOCKS" in text
    assert json.loads(headrace("explain", "r1", "--json").stdout)["recomputed_tokens"] == 12


def test_what_a_server_does_not_serve_yet_is_said(headrace):
    result = headrace("explain", "later")
    assert result.exit_code == 1
    assert "comes with a later version [NOT_YET]" in result.stderr


def test_models_and_pool_are_tables(headrace):
    assert headrace("models").stdout == "MODEL  MAX TOKENS  WORKERS\nfake   2048        1\n"
    assert json.loads(headrace("models", "--json").stdout)[0]["name"] == "fake"
    lines = headrace("pool").stdout.splitlines()
    assert lines[1].split() == ["w0", "fake", "ready", "unspecified", "cpu", "2/8", "0", "60%"]
    assert lines[2] == "in the router: 2 waiting, 3 given to schedulers"
    assert json.loads(headrace("pool", "--json").stdout)["num_queued"] == 2


@pytest.mark.system
def test_top_goes_on_until_ctrl_c(command):
    process = command("top", "--interval-s", "0.1")
    for _ in range(2):
        while b"in the router" not in process.stdout.readline():
            pass
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, b"")
