"""Which parts an engine is put together from, and which settings are refused."""

import sys
from pathlib import Path

import pytest
import torch
import transformers

from gpuworker import engine as engine_module
from gpuworker.attention.cpu import TorchAttention
from gpuworker.attention.native import NativeAttention
from gpuworker.attention.triton.configs import Target
from gpuworker.config import KvCacheSettings, WorkerSettings
from gpuworker.engine import DeviceParts, LoadedModel, load_engine
from gpuworker.kernels.twins import TorchOps
from gpuworker.kv_pool import KvPoolError, block_bytes, num_blocks_that_fit
from gpuworker.machine import driver_version, gpu_driver
from gpuworker.models.source import open_source
from tests.gpuworker.tiny import LLAMA, save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_checkpoint(folder, transformers.LlamaConfig(**LLAMA))
    return folder


def load(folder: Path, parts: DeviceParts | None = None, **settings: object) -> LoadedModel:
    given = {"device": "cpu", "num_kv_blocks": 9} | settings
    of_pool = {name: given.pop(name) for name in KvCacheSettings.__struct_fields__ if name in given}
    return load_engine(
        WorkerSettings(**given),
        KvCacheSettings(**of_pool),
        open_source(folder),
        loading=lambda *_: None,
        capturing=lambda *_: None,
        parts=parts,
    )


def test_a_cpu_gets_float32_blocks_of_16_and_512_tokens_a_step(checkpoint: Path) -> None:
    engine = load(checkpoint)
    limits = engine.runner.limits
    assert (engine.device, engine.dtype) == ("cpu", "float32")
    assert (limits.block_size, limits.num_kv_blocks) == (16, 10)
    assert (limits.max_num_batched_tokens, limits.max_num_seqs) == (512, 256)
    assert limits.max_model_len == 512
    assert limits.eos_token_ids == (3, 5)


@pytest.mark.parametrize(("device", "num_warnings"), [("auto", 1), ("cpu", 0)])
def test_a_gpu_that_torch_does_not_see_is_not_passed_over_in_silence(
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    device: str,
    num_warnings: int,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(engine_module, "gpu_driver", lambda: "/dev/nvidiactl")
    assert load(checkpoint, device=device).device == "cpu"
    found = [r.getMessage() for r in caplog.records if "/dev/nvidiactl" in r.getMessage()]
    assert len(found) == num_warnings
    assert all("torch" in text and "--device cpu" in text for text in found)


def test_a_driver_is_known_by_its_device_file(tmp_path: Path) -> None:
    assert gpu_driver(tmp_path) is None
    (tmp_path / "kfd").touch()
    assert gpu_driver(tmp_path) == str(tmp_path / "kfd")


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
        ({"attention": "flashinfer"}, "does not run on cpu"),
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


def test_eight_bit_keys_and_values_need_torch_attention_on_a_cpu(checkpoint: Path) -> None:
    engine = load(checkpoint, kv_cache_dtype="fp8")
    assert (engine.dtype, engine.kv_dtype) == ("float32", "float8_e4m3fn")
    assert isinstance(engine.runner.forward.attention, TorchAttention)
    assert {layer.key.dtype for layer in engine.runner.forward.kv} == {torch.float8_e4m3fn}
    with pytest.raises(ValueError, match="attention native: no code for keys and values in"):
        load(checkpoint, kv_cache_dtype="fp8", attention="native")


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm90", torch.float8_e4m3fn),
        ("sm100", torch.float8_e4m3fn),
        ("gfx942", torch.float8_e4m3fnuz),
    ],
)
def test_each_gpu_gets_its_own_eight_bit_type(
    monkeypatch: pytest.MonkeyPatch, arch: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(engine_module, "detect", lambda device: Target(arch, 1))
    cuda = torch.device("cuda")
    assert engine_module._kv_dtype("fp8", cuda, torch.bfloat16) == dtype
    assert engine_module._kv_dtype("auto", cuda, torch.bfloat16) == torch.bfloat16


def test_flashinfer_says_how_to_get_it(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    engine = load(checkpoint)
    place = (torch.device("cuda"), torch.bfloat16)
    config = open_source(checkpoint).config
    with pytest.raises(ValueError, match=r"attention flashinfer: .*headrace\[flashinfer\]"):
        engine_module.attention_backend(
            "flashinfer", engine.runner.limits, config, place, torch.bfloat16
        )


def test_a_gpu_without_eight_bit_floats_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "detect", lambda device: Target("sm80", 1))
    with pytest.raises(ValueError, match="kv-cache-dtype fp8: sm80 has no eight-bit floats"):
        engine_module._kv_dtype("fp8", torch.device("cuda"), torch.bfloat16)


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
    # A quarter of float32: four times the blocks.
    limits = load(
        checkpoint, num_kv_blocks=None, kv_cache_memory_bytes=7 * size, kv_cache_dtype="fp8"
    ).runner.limits
    assert limits.num_kv_blocks == 28
    with pytest.raises(KvPoolError, match="at least 2"):
        load(checkpoint, num_kv_blocks=None, kv_cache_memory_bytes=size)


def test_the_pool_is_no_larger_than_all_rows_can_use(checkpoint: Path) -> None:
    limits = load(checkpoint, num_kv_blocks=None, max_num_seqs=2).runner.limits
    assert limits.num_kv_blocks == 2 * 512 // 16 + 1
    assert num_blocks_that_fit(10**12, 1000, 50) == 51


def test_without_triton_a_gpu_runs_torchs_passes_and_records_no_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "gpuworker.kernels.fused", None)
    parts = DeviceParts.of(torch.device("cuda"))
    assert isinstance(parts.ops, TorchOps)
    assert parts.make_recorder is None


def test_the_driver_is_named_as_the_kernel_tells(tmp_path):
    nvidia, amd = tmp_path / "nvidia", tmp_path / "amd"
    assert driver_version(nvidia, amd) == ""
    amd.write_text("6.12.12\n")
    assert driver_version(nvidia, amd) == "6.12.12"
    nvidia.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Thu Jul 17 21:08:29 UTC 2025\n"
    )
    assert driver_version(nvidia, amd) == "580.65.06"
