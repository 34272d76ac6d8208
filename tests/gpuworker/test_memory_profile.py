"""How large the pool becomes on a GPU, with a GPU's memory made up."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from gpuworker.core.input_batch import BatchLimits, InputBatch
from gpuworker.forward import Forward
from gpuworker.kernels.twins import TorchOps
from gpuworker.kv_pool import KvPoolError
from gpuworker.memory_profile import largest_step
from tests.gpuworker.fake_memory import FakeGpu, FakeMemory
from tests.gpuworker.test_engine import load
from tests.gpuworker.tiny import LLAMA, save_checkpoint

MIB = 1 << 20
BLOCK_BYTES = 2 * 3 * 2 * 16 * 16 * 4
MEMORY = FakeMemory(
    total=1000 * MIB,
    others=100 * MIB,
    weights=400 * MIB,
    step=200 * MIB,
    shared_graph=50 * MIB,
    each_graph=2 * MIB,
)
# Of 12 rows: 1, 2, 4, 8, 12.
NUM_GRAPHS = 5
SETTINGS = {"num_kv_blocks": None, "max_num_seqs": 12}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


def num_blocks(checkpoint: Path, gpu: FakeGpu, **settings: object) -> int:
    engine = load(checkpoint, gpu.parts, **SETTINGS | settings)
    return engine.runner.limits.num_kv_blocks


def test_the_pool_takes_what_all_else_leaves(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = 50 * MIB + (NUM_GRAPHS - 1) * 2 * MIB
    left = 9 * BLOCK_BYTES + BLOCK_BYTES // 2
    total = 700 * MIB + graphs + left
    gpu = FakeGpu(replace(MEMORY, total=total))
    with caplog.at_level(logging.INFO, logger="gpuworker.engine"):
        assert num_blocks(checkpoint, gpu, gpu_memory_utilization=1.0) == 9
    (table,) = [record.getMessage() for record in caplog.records if "memory of" in record.msg]
    assert "- weights and buffers                  0.39 GiB" in table
    # Two to measure, then all of them.
    assert [recorder.num_recorded for recorder in gpu.recorders] == [2, NUM_GRAPHS]


def test_the_largest_step_meets_every_kernel_that_chooses_tokens(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling one takes a second or two, which no request should wait for."""
    names = ("edit_logits", "adjust_logits", "sample")
    seen = set()
    for name in names:
        method = getattr(TorchOps, name)

        def noted(*arguments: Any, name: str = name, method: Any = method) -> Any:
            seen.add(name)
            return method(*arguments)

        monkeypatch.setattr(TorchOps, name, noted)
    num_blocks(checkpoint, FakeGpu(replace(MEMORY)), enforce_eager=True)
    assert seen == set(names)


def test_the_two_largest_graphs_are_measured_then_all_are_captured(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []
    capture = Forward.capture

    def noted(forward: Forward, sizes: Sequence[int], *arguments: Any) -> None:
        captured.append(list(sizes))
        capture(forward, sizes, *arguments)

    monkeypatch.setattr(Forward, "capture", noted)
    num_blocks(checkpoint, FakeGpu(replace(MEMORY)))
    assert captured == [[12], [8], [1, 2, 4, 8, 12]]


def test_utilization_is_a_share_of_the_whole_device(checkpoint: Path) -> None:
    given = {"max_num_seqs": 256, "enforce_eager": True}
    whole = num_blocks(checkpoint, FakeGpu(replace(MEMORY)), gpu_memory_utilization=0.74, **given)
    less = num_blocks(checkpoint, FakeGpu(replace(MEMORY)), gpu_memory_utilization=0.72, **given)
    assert (whole - less) * BLOCK_BYTES == pytest.approx(20 * MIB, abs=BLOCK_BYTES)


def test_without_graphs_nothing_is_kept_for_them(checkpoint: Path) -> None:
    gpu = FakeGpu(replace(MEMORY, total=700 * MIB + 5 * BLOCK_BYTES))
    assert num_blocks(checkpoint, gpu, gpu_memory_utilization=1.0, enforce_eager=True) == 5
    assert gpu.recorders == []


def test_no_memory_left_is_an_error_that_says_what_to_lower(checkpoint: Path) -> None:
    gpu = FakeGpu(replace(MEMORY, total=700 * MIB))
    with pytest.raises(KvPoolError, match="max-num-batched-tokens") as caught:
        num_blocks(checkpoint, gpu)
    assert "- the largest step                     0.20 GiB" in str(caught.value)
    assert "gpu-memory-utilization" in str(caught.value)


def test_graph_sizes_are_those_asked_for(checkpoint: Path) -> None:
    gpu = FakeGpu(replace(MEMORY))
    engine = load(checkpoint, gpu.parts, **SETTINGS | {"cuda_graph_sizes": (64, 3, 3)})
    assert gpu.recorders[-1].num_recorded == 2
    assert sorted(engine.runner.forward._graphs) == [3, 12]
    with pytest.raises(ValueError, match="cuda-graph-sizes"):
        load(checkpoint, gpu.parts, **SETTINGS | {"cuda_graph_sizes": (0,)})


@pytest.mark.parametrize(("max_num_seqs", "tokens"), [(256, 8192), (7, 100), (300, 64), (2, 4096)])
def test_the_largest_step_is_as_large_as_a_step_may_be(max_num_seqs: int, tokens: int) -> None:
    limits = BatchLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=512,
        max_num_batched_tokens=tokens,
        block_size=16,
        num_kv_blocks=2,
        vocab_size=50,
    )
    batch = InputBatch(limits).apply(largest_step(limits))
    assert batch.num_tokens == min(tokens, max_num_seqs * 512)
    assert len(batch.sample_rows) == min(max_num_seqs, tokens)


def test_attention_that_plans_as_it_goes_has_no_graphs(checkpoint: Path) -> None:
    gpu = FakeGpu(replace(MEMORY))
    load(checkpoint, gpu.parts, **SETTINGS | {"attention": "torch"})
    assert gpu.recorders == []
