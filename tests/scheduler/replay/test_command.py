import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from scheduler.replay.command import replay
from tests.scheduler.replay.test_replay import TRACE_BY_NAME


def write_trace(folder: Path, name: str, **changes: object) -> Path:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(TRACE_BY_NAME[name] | changes))
    return path


def test_exits_with_0_when_all_match(tmp_path: Path) -> None:
    paths = [str(write_trace(tmp_path, name)) for name in ("w01_budget512", "w10_min_tokens_hang")]
    result = CliRunner().invoke(replay, paths)
    assert result.exit_code == 0, result.output
    assert "2 of 2 match" in result.output
    assert "w10_min_tokens_hang.json: step 3: ends on purpose" in result.output


def test_replays_every_trace_of_an_archive(tmp_path: Path) -> None:
    archive = tmp_path / "traces.tar.xz"
    with tarfile.open(archive, "w:xz") as file:
        for name in ("w01_budget512", "t01_continuous_0"):
            file.add(write_trace(tmp_path, name), f"{name}.json")
    result = CliRunner().invoke(replay, [str(archive)])
    assert (result.exit_code, result.output) == (0, "2 of 2 match\n")


def test_prints_the_first_difference_and_exits_with_1(tmp_path: Path) -> None:
    steps = json.loads(json.dumps(TRACE_BY_NAME["w01_budget512"]["steps"]))
    steps[1]["sched"]["free"] = 12345
    path = write_trace(tmp_path, "w01_budget512", steps=steps)
    result = CliRunner().invoke(replay, [str(path)])
    assert result.exit_code == 1
    assert "w01_budget512.json: step 1: sched.free" in result.output
    assert "expected  12345" in result.output


def test_shows_what_another_setting_would_have_done(tmp_path: Path) -> None:
    path = write_trace(tmp_path, "t22_no_reserve_isl_0")
    result = CliRunner().invoke(replay, ["--set", "reserve_full_sequence=true", str(path)])
    assert result.exit_code == 0, result.output
    lines = {
        line.split("  ")[1].strip(): line.split()[-2:] for line in result.output.splitlines()[2:]
    }
    recorded, changed = map(int, lines["preemptions"])
    assert recorded > changed
    assert lines["output tokens"][0] == lines["output tokens"][1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("polic=fcfs", "expected NAME=VALUE"),
        ("policy=fair", "expected one of fcfs, priority"),
        ("max_num_seqs=many", "expected a number"),
        ("num_gpu_blocks=10000000000", "num_gpu_blocks"),
        ("block_size=0", "block_size"),
        ("watermark=nan", "watermark"),
        ("pipeline_depth=99", "pipeline_depth"),
    ],
)
def test_refuses_settings_that_do_not_exist(tmp_path: Path, change: str, message: str) -> None:
    path = write_trace(tmp_path, "w01_budget512")
    result = CliRunner().invoke(replay, ["--set", change, str(path)])
    assert result.exit_code == 2
    assert message in result.output


def test_says_so_when_a_recording_has_no_step_yet(tmp_path: Path) -> None:
    head = {k: v for k, v in TRACE_BY_NAME["w01_budget512"].items() if k != "steps"}
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(head) + "\n")
    result = CliRunner().invoke(replay, [str(path)])
    assert result.exit_code == 1
    assert "no step is recorded in it yet" in result.output


@pytest.mark.parametrize("data", [b"[1, 2", b"\xd0\xcf"])
def test_says_so_when_a_file_is_no_trace(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(data)
    result = CliRunner().invoke(replay, [str(path)])
    assert result.exit_code == 1
    assert "is no trace" in result.output
