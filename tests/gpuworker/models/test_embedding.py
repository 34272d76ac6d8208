"""Rows of the embedding as the file has them."""

from pathlib import Path

import gguf
import pytest
import torch
import transformers

from gpuworker.models.gguf_file import GgufSource
from gpuworker.models.loader import load_decoder
from gpuworker.models.source import WeightSource, open_source
from tests.gpuworker.models.test_gguf_file import SIZES, write_gguf
from tests.gpuworker.tiny import LLAMA, save_checkpoint

NAME = "model.embed_tokens.weight"
TOKENS = torch.tensor([5, 0, 127, 5])


def embedded(source: WeightSource, dtype: torch.dtype) -> torch.Tensor:
    decoder = load_decoder(source, torch.device("cpu"), dtype, lambda *_: None)
    rows = decoder._weights.embedding(TOKENS)
    assert rows.dtype == decoder.dtype == dtype
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q5_1", "Q4_0"])
def test_rows_of_a_gguf_file_are_those_of_the_whole_table(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    save_checkpoint(tmp_path / "folder", config)
    write_gguf(tmp_path / "model.gguf", tmp_path / "folder", gguf.GGMLQuantizationType[kind])
    source = GgufSource(tmp_path / "model.gguf")
    assert torch.equal(embedded(source, dtype), source.read(NAME)[TOKENS].to(dtype))
    assert (source.stored_rows(NAME) is None) == (kind == "F32")


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_folder_are_those_of_the_whole_table(stored: torch.dtype, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**LLAMA)
    model = save_checkpoint(tmp_path, config)
    model.to(stored).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    assert torch.equal(embedded(source, torch.float32), source.read(NAME)[TOKENS].float())
    assert (source.stored_rows(NAME) is None) == (stored == torch.float32)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_rows_can_be_changed_without_changing_the_table(
    stored: torch.dtype, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path, transformers.LlamaConfig(**LLAMA)).to(stored).save_pretrained(
        tmp_path
    )
    for dtype in (torch.float32, torch.bfloat16):
        decoder = load_decoder(open_source(tmp_path), torch.device("cpu"), dtype, lambda *_: None)
        rows = decoder._weights.embedding(TOKENS)
        expected = rows.clone()
        rows.zero_()
        assert torch.equal(decoder._weights.embedding(TOKENS), expected)
