"""Memory of the KV pool, when there is none."""

from pathlib import Path

import pytest
import torch
import transformers

from gpuworker import kv_pool
from gpuworker.models.source import open_source
from tests.gpuworker.tiny import LLAMA, save_checkpoint


def test_a_pool_larger_than_any_memory_is_a_clear_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, transformers.LlamaConfig(**LLAMA))
    config = open_source(tmp_path).config
    with pytest.raises(kv_pool.KvPoolError, match="give fewer"):
        kv_pool.allocate(config, 10**13, 16, torch.float32, torch.device("cpu"))
