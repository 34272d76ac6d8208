"""Folders that are damaged or are not what their configuration says."""

import gc
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from gpuworker.models.errors import WeightError
from gpuworker.models.loader import load_decoder, with_max_model_len
from gpuworker.models.source import open_source
from tests.gpuworker.driver import Driver
from tests.gpuworker.tiny import LLAMA, make_runner, save_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, transformers.LlamaConfig(**LLAMA))
    return tmp_path


def load(folder: Path) -> list[tuple[int, int]]:
    """Loads; returns the progress."""
    progress: list[tuple[int, int]] = []
    source = open_source(folder)
    load_decoder(source, torch.device("cpu"), torch.float32, lambda *step: progress.append(step))
    return progress


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrites the weights with some tensors changed, or removed where None."""
    file = folder / "model.safetensors"
    weights = load_file(file) | {name.replace("__", "."): t for name, t in tensors.items()}
    save_file({name: t for name, t in weights.items() if t is not None}, file)


def test_progress_counts_every_tensor(folder: Path) -> None:
    progress = load(folder)
    assert progress[-1] == (30, 30)
    assert [done for done, _ in progress] == list(range(1, 31))


def test_shards_give_the_same_tokens_as_one_file(folder: Path, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.save_pretrained(shards, max_shard_size="60KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    outputs = []
    for path in (folder, shards):
        driver = Driver(make_runner(path))
        driver.add(0, [7, 8, 9])
        outputs.append(driver.finish(0, 5))
    assert outputs[0] == outputs[1]
    next(shards.glob("*-00002-*")).unlink()
    with pytest.raises(WeightError, match=r"names 'model-00002-.*not in"):
        load(shards)


def anonymous_bytes() -> int:
    """Memory of this process that is not a mapped file's."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    (line,) = [line for line in rollup.splitlines() if line.startswith("Anonymous:")]
    return int(line.split()[1]) * 1024


def test_shards_are_streamed_without_a_second_copy_in_memory(tmp_path: Path) -> None:
    sizes = {"hidden_size": 510, "intermediate_size": 2048, "num_hidden_layers": 8}
    config = transformers.LlamaConfig(**(LLAMA | sizes))
    save_checkpoint(tmp_path, config, max_shard_size="20MB")
    shards = list(tmp_path.glob("*.safetensors"))
    model_bytes = sum(file.stat().st_size for file in shards)
    assert len(shards) > 4
    gc.collect()
    used: list[int] = []
    source = open_source(tmp_path)
    before = anonymous_bytes()
    decoder = load_decoder(
        source, torch.device("cpu"), torch.float32, lambda *_: used.append(anonymous_bytes())
    )
    assert decoder.dtype == torch.float32
    # A second copy would make 2; what the allocator keeps differs between machines.
    assert max(used) - before < 1.6 * model_bytes


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(WeightError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        load(folder)


def test_a_tensor_of_another_shape_is_named(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(47))
    with pytest.raises(WeightError, match=r"'model\.norm\.weight' has shape \[47\].*\[48\]"):
        load(folder)


def test_a_tensor_nobody_asked_for_is_named(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__sinks=torch.ones(3))
    with pytest.raises(WeightError, match=r"self_attn\.sinks' is not part of a llama model"):
        load(folder)


def test_stored_rotary_frequencies_do_no_harm(folder: Path) -> None:
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(folder)


def test_a_truncated_file_names_the_tensor_it_cuts(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(WeightError, match=r"tensor 'model\..*' in model.safetensors is truncated"):
        load(folder)
    file.write_bytes(content[:100])
    with pytest.raises(WeightError, match="header is cut"):
        load(folder)
    file.write_bytes(b"")
    with pytest.raises(WeightError, match="header is cut"):
        load(folder)


def test_a_quantized_checkpoint_is_refused_by_type(folder: Path) -> None:
    change(folder, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(WeightError, match=r"'model\.norm\.weight'.*has type I8"):
        load(folder)


def test_a_folder_without_its_parts_says_which_is_missing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(WeightError, match=r"no \.safetensors"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(WeightError, match="is not JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(WeightError, match=r"has no config\.json"):
        load(folder)


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    assert open_source(folder).eos_token_ids == (3, 5)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 9}))
    assert open_source(folder).eos_token_ids == (9,)
    generation.unlink()
    assert open_source(folder).eos_token_ids == (3, 5)


def test_the_context_can_only_be_shortened(folder: Path) -> None:
    config = open_source(folder).config
    assert with_max_model_len(config, 100).max_model_len == 100
    assert with_max_model_len(config, None).max_model_len == 512
    for wrong in (0, 513):
        with pytest.raises(ValueError, match=r"\[1, 512\]"):
            with_max_model_len(config, wrong)
