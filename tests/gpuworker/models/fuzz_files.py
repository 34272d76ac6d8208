"""Reads mutated model files: `python -m tests.gpuworker.models.fuzz_files KIND FOLDER COUNT`.

FOLDER holds a good model, a GGUF file or a Hugging Face folder, and is written to.
"""

import json
import random
import sys
from pathlib import Path

import torch

from gpuworker.models.errors import UnsupportedModelError, WeightError
from gpuworker.models.loader import load_decoder
from gpuworker.models.source import open_source
from tests.mutation import limit_process, mutated, mutated_json, read_all

_CPU_S = 120


def main(kind: str, folder: Path, count: int) -> None:
    model = folder / "model.gguf" if kind == "gguf" else folder

    def read() -> None:
        source = open_source(model)
        load_decoder(source, torch.device("cpu"), torch.float32, lambda _done, _all: None)

    read()
    file = folder / {"gguf": "model.gguf", "weights": "model.safetensors"}.get(kind, "config.json")
    good = file.read_bytes()

    def make(seed: int) -> None:
        rng = random.Random(seed)
        if kind == "config":
            file.write_text(json.dumps(mutated_json(rng, json.loads(good))))
        elif kind == "weights" and seed % 2:
            size = int.from_bytes(good[:8], "little")
            text = json.dumps(mutated_json(rng, json.loads(good[8 : 8 + size]))).encode()
            file.write_bytes(len(text).to_bytes(8, "little") + text + good[8 + size :])
        else:
            file.write_bytes(mutated(rng, good, 1200))

    limit_process(_CPU_S)
    read_all(count, make, read, (WeightError, UnsupportedModelError))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
