"""Reads mutated tokenizers: `python -m tests.router.text.fuzz_tokenizers KIND FOLDER COUNT`.

FOLDER holds a good one, model.gguf or tokenizer.json with its configuration, and is written to.
"""

import json
import random
import sys
from pathlib import Path

from router.text.errors import UnsupportedTokenizerError
from router.text.jobs import Done, Encode, JobFailed, perform
from router.text.tokenizer import load_model_text
from tests.mutation import limit_process, mutated, mutated_json, read_all

_CPU_S = 120


def main(kind: str, folder: Path, count: int) -> None:
    model = folder / "model.gguf" if kind == "gguf" else folder

    def read() -> None:
        job = Encode(model="m", text="abc <s> w\u00f6rld" * 3, add_special_tokens=True)
        assert isinstance(perform(job, {"m": load_model_text(model)}), Done | JobFailed)

    read()
    file = folder / {"gguf": "model.gguf", "tokenizer": "tokenizer.json"}.get(
        kind, "tokenizer_config.json"
    )
    good = file.read_bytes()

    def make(seed: int) -> None:
        rng = random.Random(seed)
        if kind == "gguf" or seed % 4 == 0:
            file.write_bytes(mutated(rng, good, len(good)))
        else:
            file.write_text(json.dumps(mutated_json(rng, json.loads(good))))

    limit_process(_CPU_S)
    read_all(count, make, read, (UnsupportedTokenizerError,))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
