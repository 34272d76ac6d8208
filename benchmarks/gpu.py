"""`make bench-gpu`: Headrace's speed on this machine's GPU.

Prints the measured copy bandwidth and matrix peak, attention and other kernels as shares of these,
and whole models in tokens per second beside other installed engines. The results are also written
to build/bench-gpu.json and build/bench-gpu.md. Without a GPU nothing is measured and the exit
status is 2. --dry-run runs every benchmark on a CPU, in tiny sizes, to show that the code works;
its figures mean nothing and are written to build/dry-run.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Read when triton is imported.
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from benchmarks import gpu_machine, kernels, whole_model
from benchmarks.gpu_machine import Machine, Peaks
from benchmarks.tables import Table
from gpuworker.attention.flashinfer import (
    FlashInferAttention,
    FlashInferSetup,
    FlashInferUnavailableError,
    load,
)
from gpuworker.attention.interface import AttentionBackend
from gpuworker.attention.triton.backend import AttentionSetup

NO_GPU = 2
_OUT = Path("build")
_DRY_OUT = _OUT / "dry-run"
PARTS = ("kernels", "models")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each (median)")
    parser.add_argument("--only", choices=PARTS, help="one part; both by default")
    parser.add_argument("--out", type=Path, help="folder of the written results")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU; no figure means anything")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print(
            "bench-gpu: torch sees no GPU here, nothing was measured"
            ' (make bench-gpu ARGS="--dry-run" goes through it on a CPU)',
            file=sys.stderr,
        )
        return NO_GPU
    machine = gpu_machine.dry() if options.dry_run else gpu_machine.gpu(options.repeats)
    peaks = gpu_machine.measure_peaks(machine)
    name = f"{machine.name}, {machine.target.arch}, {machine.target.num_processors} processors"
    if machine.is_dry:
        name = "dry run on a CPU: no figure below means anything"
    print(f"{name}\nmeasured {peaks}\n")
    tables = []
    for table in _tables(machine, peaks, options.only):
        print(table.text() + "\n", flush=True)
        tables.append(table)
    # A dry run has its own files, so that it never overwrites a GPU's results.
    _write(options.out or (_DRY_OUT if machine.is_dry else _OUT), name, peaks, tables)
    return 0


def _tables(machine: Machine, peaks: Peaks, only: str | None) -> Iterator[Table]:
    if only != "models":
        peer = None if machine.is_dry else flashinfer()
        several = kernels.TINY_HEADS if machine.is_dry else kernels.FULL_HEADS
        for heads in several:
            yield from kernels.attention_tables(machine, peaks, heads, machine.dtype, peer)
        if machine.float8 is not None:
            yield from kernels.attention_tables(machine, peaks, several[0], machine.float8)
        yield kernels.op_table(machine, peaks)
    if only != "kernels":
        for task in whole_model.tasks(machine):
            yield whole_model.model_table(task)


def flashinfer() -> Callable[[AttentionSetup, Machine], AttentionBackend] | None:
    """A factory of FlashInfer's attention, or None if FlashInfer is unavailable."""
    try:
        library = load()
    except FlashInferUnavailableError:
        return None

    def make(setup: AttentionSetup, machine: Machine) -> AttentionBackend:
        of_model = FlashInferSetup(setup.shape, setup.num_heads, machine.dtype, setup.kv_dtype)
        return FlashInferAttention(of_model, machine.device, library)

    return make


def _write(folder: Path, name: str, peaks: Peaks, tables: list[Table]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page = "\n".join([f"## {name}\n\nMeasured {peaks}.\n", *(table.markdown() for table in tables)])
    (folder / "bench-gpu.md").write_text(page, encoding="utf-8")
    results = {
        "device": name,
        "copy_bytes_per_s": peaks.copy,
        "matrix_operations_per_s": peaks.matrix,
        "tables": [table.as_json() for table in tables],
    }
    text = json.dumps(results, indent=1) + "\n"
    (folder / "bench-gpu.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
