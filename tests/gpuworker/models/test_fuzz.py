"""Mutated model files are read or refused, in bounded time and memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from tests.gpuworker.models.gguf_bytes import llama
from tests.gpuworker.tiny import LLAMA, save_checkpoint

NUM_FILES = 400
SIZES = LLAMA | {"intermediate_size": 32, "num_hidden_layers": 2}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["gguf", "weights", "config"])
def test_mutated_files_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    if kind == "gguf":
        llama().write(tmp_path / "model.gguf")
    else:
        save_checkpoint(tmp_path, transformers.LlamaConfig(**SIZES))
    command = [sys.executable, "-m", "tests.gpuworker.models.fuzz_files", kind, str(tmp_path)]
    done = subprocess.run(
        [*command, str(NUM_FILES)], capture_output=True, text=True, check=False, timeout=580
    )
    assert done.returncode == 0, done.stderr[-3000:]
    num_read, num_refused = (int(word) for word in done.stdout.split() if word.isdigit())
    assert min(num_read, num_refused) > 0, done.stdout
