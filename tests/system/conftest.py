"""Fixtures of tests with real processes."""

from pathlib import Path

import pytest
import transformers

from tests.gpuworker.tiny import LLAMA, save_checkpoint
from tests.router.tiny_models import byte_level_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: random weights and a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("tiny")
    tokenizer = byte_level_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    save_checkpoint(folder, transformers.LlamaConfig(**{**LLAMA, "vocab_size": vocab_size}))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
