"""The incident in docs/slow.md: its commands print what the page says, and its alert fires."""

import json
import lzma
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from benchmarks.incident import record
from scheduler.replay.command import replay
from scheduler.replay.reader import read_traces
from scheduler.replay.slow import waits_of

ROOT = Path(__file__).parents[2]
RECORDING = ROOT / "tests" / "data" / "incident.jsonl.xz"
RULES = ROOT / "helm" / "headrace" / "monitoring" / "rules.yaml"
PAGE = (ROOT / "docs" / "slow.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```console\n\$ headrace replay (.*)\n((?:.*\n)*?)```", PAGE)


@pytest.fixture(scope="module")
def waits():
    ((_, trace),) = read_traces(RECORDING)
    return waits_of(trace)


def test_the_page_has_the_commands():
    assert [words.split()[0] for words, _ in COMMANDS] == ["--slow", *["--explain"] * 2, "--set"]


@pytest.mark.parametrize(("words", "expected"), COMMANDS)
def test_a_command_prints_what_the_page_says(words, expected, monkeypatch):
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(replay, words.split())
    assert (result.exit_code, result.output) == (0, expected)


def test_the_recording_is_what_its_program_makes_and_replays():
    lines = lzma.decompress(RECORDING.read_bytes()).splitlines()
    made = json.loads(json.dumps(record()))
    # A later version may note more of each step: the inputs are the same.
    assert len(lines) == len(made)
    for line, expected in zip(lines, made, strict=True):
        recorded = json.loads(line)
        for name in ("config", "requests", "now"):
            assert recorded.get(name) == expected.get(name)
    result = CliRunner().invoke(replay, [str(RECORDING)])
    assert (result.exit_code, result.output) == (0, "1 of 1 match\n")


def test_the_numbers_in_the_text_are_the_recordings(waits):
    assert "one request in ten" in PAGE
    assert 0.09 < waits.num_missed / len(waits.requests) < 0.11
    assert "p99 falls from 75 steps to 15" in PAGE
    table = next(output for words, output in COMMANDS if words.startswith("--set"))
    assert re.search(r"p99 steps to 1st token +75\.\d +15\.\d\n", table)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is Prometheus' own")
@pytest.mark.parametrize("num_missed", [None, 0])
def test_the_alert_fires_for_the_recording_and_not_without_missed_deadlines(
    waits, num_missed, tmp_path
):
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    missed = waits.num_missed if num_missed is None else num_missed
    num_requests = len(waits.requests)
    # What the router's counters come to in the five minutes around the run.
    counters = {
        'headrace_requests_accepted_total{namespace="n",model="m",tenant=""}': num_requests,
        'headrace_requests_ended_total{namespace="n",reason="deadline"}': missed,
        'headrace_requests_ended_total{namespace="n",reason="length"}': num_requests - missed,
    }
    series = [{"series": name, "values": f"0x4 {count}x40"} for name, count in counters.items()]
    expected = [{"labels": '{namespace="n"}', "value": 1}] if missed else []
    expression = f"({rules['HeadraceDeadlinesMissed']['expr']}) * 0 + 1"
    test = {
        "interval": "30s",
        "input_series": series,
        "promql_expr_test": [{"expr": expression, "eval_time": "5m", "exp_samples": expected}],
    }
    file = tmp_path / "test.yaml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = subprocess.run(
        ["promtool", "test", "rules", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
