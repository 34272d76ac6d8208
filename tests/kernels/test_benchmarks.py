"""`make bench-gpu` and the tuner go through everything under the interpreter: nobody else has."""

import json

import pytest
import torch

from benchmarks import gpu, gpu_machine, kernels, kernels_tune
from gpuworker.attention.triton import configs
from gpuworker.attention.triton.configs import ConfigKey, TileConfig


def test_kernels_are_measured_printed_and_written(tmp_path, capsys) -> None:
    assert gpu.main(["--dry-run", "--only", "kernels", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "bench-gpu.json").read_text())
    page = (tmp_path / "bench-gpu.md").read_text()
    titles = [table["title"] for table in results["tables"]]
    assert len(titles) == 7
    for title in titles:
        assert title in printed
        assert title in page
    names = {row["kernel"] for row in results["tables"][-1]["rows"]}
    assert names >= {"add_rms_norm", "silu gate", "rotate_and_write", "sample top_p 0.9"}
    assert all(row["us"] > 0 for table in results["tables"] for row in table["rows"])


def test_without_a_gpu_it_says_what_can_be_done(
    monkeypatch: pytest.MonkeyPatch, capsys, tmp_path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main(["--out", str(tmp_path)]) == gpu.NO_GPU
    assert "--dry-run" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_that_it_is_one_and_leaves_the_real_figures_alone(
    monkeypatch: pytest.MonkeyPatch, capsys, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "_tables", lambda *_: [])
    assert gpu.main(["--dry-run"]) == 0
    assert "no figure below means anything" in capsys.readouterr().out
    assert not (tmp_path / "build" / "bench-gpu.md").exists()
    assert (tmp_path / "build" / "dry-run" / "bench-gpu.md").exists()


def test_wrong_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.AttentionRun, "error", lambda self: torch.nan)
    machine = gpu_machine.dry()
    with pytest.raises(SystemExit, match="nothing is timed"):
        kernels.attention_tables(
            machine, gpu_machine.Peaks(1.0, 1.0), kernels.TINY_HEADS[0], machine.dtype
        )


def test_the_tuner_tries_candidates_and_prints_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(kernels_tune, "GAIN", -1000.0)
    before = dict(configs.TUNED)
    arguments = ["--dry-run", "--heads", "4", "2", "16", "--float8"]
    assert kernels_tune.main(arguments) == 0
    table = eval("{" + capsys.readouterr().out + "}", vars(configs))  # what is pasted
    assert set(table) == {
        ConfigKey("sm90", 16, 2, 64, "float8", kind) for kind in ("decode", "chunk")
    }
    assert before == configs.TUNED


def test_a_candidate_that_does_not_compile_loses(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    measured = kernels_tune._seconds
    calls = []

    def seconds(*arguments) -> float:
        calls.append(arguments)
        if len(calls) % 3 == 2:
            raise RuntimeError("PassManager::run failed")
        return measured(*arguments)

    monkeypatch.setattr(kernels_tune, "_seconds", seconds)
    assert kernels_tune.main(["--dry-run", "--heads", "4", "2", "16"]) == 0
    assert capsys.readouterr().err.count("RuntimeError") == 2
    assert configs.TUNED == {}


def test_a_tuned_line_reads_back_as_what_it_was() -> None:
    key = ConfigKey("gfx942", 128, 4, 64, "wide", "chunk")
    config = TileConfig(128, 64, 8, 2, True, False)
    line = kernels_tune.table_line(key, config)
    assert eval("{" + line + "}", vars(configs)) == {key: config}
