"""Whole models in tokens a second: our runner's, and other engines' by their own interfaces."""

import json
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_machine, peers, whole_model
from benchmarks.whole_model import Speeds
from gpuworker.config import KvCacheSettings
from gpuworker.kv_pool import KvPoolError

TASK = whole_model.tasks(gpu_machine.dry())[0]


def test_our_runner_prefills_in_chunks_and_decodes_every_batch() -> None:
    speeds = whole_model.ours(TASK)
    assert speeds.prefill > 0
    assert set(speeds.decode) == set(TASK.batches)
    assert all(speed > 0 for speed in speeds.decode.values())


def test_a_batch_that_the_pool_does_not_hold_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    small = KvCacheSettings(block_size=whole_model.BLOCK_SIZE, num_kv_blocks=2)
    monkeypatch.setattr(whole_model, "KvCacheSettings", lambda block_size: small)
    assert set(whole_model.ours(TASK).decode) == {1}


def test_a_model_that_does_not_fit_is_a_row_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(task: object) -> Speeds:
        raise KvPoolError("no room for 2 blocks")

    monkeypatch.setattr(whole_model, "ours", too_large)
    monkeypatch.setattr(whole_model, "_PEERS", ())
    (row,) = whole_model.model_table(TASK).rows
    assert row == ("headrace", "does not fit: no room for 2 blocks", "", "")


def test_transformers_does_the_same_task() -> None:
    speeds = peers.run_transformers(asdict(TASK))
    assert speeds["prefill"] > 0
    assert set(speeds["decode"]) == set(TASK.batches)


class FakeEngine:
    """Takes what vLLM's offline interface takes, and notes it."""

    def __init__(self, **options: object) -> None:
        self.hf = json.loads(Path(options["model"], "config.json").read_text(encoding="utf-8"))
        assert options["load_format"] == "dummy"
        assert options["max_num_seqs"] == max(TASK.batches)

    def generate(self, prompts: list, sampling: object, *, use_tqdm: bool) -> None:
        assert all(len(p["prompt_token_ids"]) == TASK.num_prompt_tokens for p in prompts)
        assert self.hf == TASK.hf
        # Time that grows with the tokens wanted, so that a decode takes some.
        torch.randn(200, 200 * sampling.max_tokens).sum()


def test_vllm_is_driven_by_its_offline_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("vllm")
    module.LLM = FakeEngine
    module.SamplingParams = types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    speeds = peers.run_vllm(asdict(TASK))
    assert set(speeds) == {"prefill", "decode"}
    assert set(speeds["decode"]) == set(TASK.batches)


def test_an_engine_that_is_not_there_or_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(TASK, hf={"model_type": "no_such_model"})
    given = {"headrace": Speeds(2000.0, {1: 30.0}), "vllm": "not installed"}
    monkeypatch.setattr(whole_model, "ours", lambda task: given["headrace"])
    monkeypatch.setattr(whole_model, "_PEERS", ("no_such_engine", "transformers"))
    table = whole_model.model_table(broken)
    by_engine = {row[0]: list(row[1:]) for row in table.rows}
    assert by_engine["headrace"] == [2000.0, 30.0, "does not fit"]
    assert by_engine["no_such_engine"][0] == "not installed"
    assert by_engine["transformers"][0].startswith("failed: ")
