"""Which parts an engine is put together from, and which settings are refused."""

from pathlib import Path

import pytest
import torch
import transformers

from gpuworker.attention.cpu import TorchAttention
from gpuworker.attention.native import NativeAttention
from gpuworker.config import WorkerSettings
from gpuworker.engine import Engine, load_engine
from gpuworker.kv_pool import KvPoolError, block_bytes, num_blocks_that_fit
from gpuworker.models.source import open_source
from tests.gpuworker.tiny import LLAMA, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


def load(folder: Path, **settings: object) -> Engine:
    return load_engine(
        WorkerSettings(**{"device": "cpu", "num_kv_blocks": 9} | settings), folder, lambda *_: None
    )


def test_a_cpu_gets_float32_blocks_of_16_and_512_tokens_a_step(checkpoint: Path) -> None:
    engine = load(checkpoint)
    limits = engine.runner.limits
    assert (engine.device, engine.dtype) == ("cpu", "float32")
    assert (limits.block_size, limits.num_kv_blocks) == (16, 10)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (512, 256)
    assert limits.max_model_len == 512
    assert limits.eos_token_ids == (3, 5)


def test_the_kernel_for_this_cpu_is_taken_where_it_can_be_built(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/compiler")
    assert isinstance(load(checkpoint).runner.forward.attention, TorchAttention)
    with pytest.raises(ValueError, match="attention native"):
        load(checkpoint, attention="native")
    monkeypatch.delenv("CXX")
    try:
        attention = load(checkpoint, attention="native").runner.forward.attention
    except ValueError as error:
        pytest.skip(str(error))
    assert isinstance(attention, NativeAttention)
    assert isinstance(load(checkpoint, attention="torch").runner.forward.attention, TorchAttention)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attention": "triton"}, "does not run on cpu"),
        ({"block_size": 24}, "block-size"),
        ({"num_kv_blocks": 0}, "num-kv-blocks"),
        ({"max_model_len": 513}, "max-model-len"),
        ({"max_num_seqs": 0}, "max-num-seqs"),
        ({"num_spec_tokens": -1}, "num-spec-tokens"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_be_met_is_named(
    checkpoint: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(checkpoint, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_a_gpu_that_is_not_there_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="device cuda"):
        load(checkpoint, device="cuda")


def test_the_pool_takes_the_memory_it_is_given(checkpoint: Path) -> None:
    size = block_bytes(open_source(checkpoint).config, 16, torch.float32)
    assert size == 2 * 3 * 2 * 16 * 16 * 4
    limits = load(
        checkpoint, num_kv_blocks=None, kv_cache_memory_bytes=7 * size + size // 2
    ).runner.limits
    assert limits.num_kv_blocks == 7
    with pytest.raises(KvPoolError, match="at least 2"):
        load(checkpoint, num_kv_blocks=None, kv_cache_memory_bytes=size)


def test_the_pool_is_no_larger_than_all_rows_can_use(checkpoint: Path) -> None:
    limits = load(checkpoint, num_kv_blocks=None, max_num_seqs=2).runner.limits
    assert limits.num_kv_blocks == 2 * 512 // 16 + 1
    assert num_blocks_that_fit(10**12, 1000, 50) == 51
