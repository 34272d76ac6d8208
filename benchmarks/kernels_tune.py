"""Finds attention's tile sizes for this machine's GPU, and prints lines for the table.

Each candidate is timed on loads of its kind. A candidate that does not compile is skipped, a wrong
result counts as infinite time, and register spills show in the time. The printed lines go unchanged
into `TUNED` of gpuworker/attention/triton/configs.py; lines that begin with # state the gain.
--dry-run tries a few candidates on a CPU, in tiny sizes, and measures nothing.

    python -m benchmarks.kernels_tune --heads 32 8 128
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import islice, product

# Read when triton is imported.
if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks import gpu_machine
from benchmarks.gpu_machine import Machine
from benchmarks.kernels import PAGE, AttentionRun, Heads, Load
from gpuworker.attention.interface import FLOAT8_TYPES
from gpuworker.attention.triton.configs import (
    TUNED,
    ConfigKey,
    Kind,
    TileConfig,
    padded,
    tile_config,
)

NO_GPU = 2
LOADS: dict[Kind, tuple[Load, ...]] = {
    "decode": (Load(1, 1, 32768), Load(16, 1, 4096), Load(128, 1, 2048), Load(16, 5, 4096)),
    "chunk": (Load(1, 2048, 2048), Load(4, 512, 4096)),
}
CHECKS: dict[Kind, Load] = {"decode": Load(2, 1, 700), "chunk": Load(2, 150, 300)}
TINY: dict[Kind, Load] = {"decode": Load(1, 1, 65), "chunk": Load(1, 40, 40)}
TOLERANCE = 2e-2
# A candidate must beat the rule by this factor to be worth a line.
GAIN = 0.02
_DRY_CANDIDATES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs=3, action="append", metavar=("H", "KV", "DIM"))
    parser.add_argument("--float8", action="store_true", help="eight-bit keys and values")
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, measuring nothing")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("kernels_tune: there is no GPU here, nothing was measured", file=sys.stderr)
        return NO_GPU
    machine = gpu_machine.dry() if options.dry_run else gpu_machine.gpu(repeats=10)
    kv_dtype = machine.float8 if options.float8 else machine.dtype
    if kv_dtype is None:
        print(f"kernels_tune: {machine.target.arch} has no eight-bit floats", file=sys.stderr)
        return NO_GPU
    for heads in options.heads or [(32, 8, 128)]:
        for kind in LOADS:
            print(_tune(machine, Heads(*heads), kind, kv_dtype), flush=True)
    return 0


def _tune(machine: Machine, heads: Heads, kind: Kind, kv_dtype: torch.dtype) -> str:
    """The gain, and the table's line unless the rule is as good."""
    group = heads.num_heads // heads.num_kv_heads
    kv_type = "float8" if kv_dtype in FLOAT8_TYPES else "wide"
    target = machine.target
    key = ConfigKey(target.arch, heads.head_dim, group, PAGE, kv_type, kind)
    TUNED.pop(key, None)
    rule = tile_config(target, key)
    rule_seconds = best_seconds = _seconds(machine, heads, kind, kv_dtype)
    best = rule
    candidates = _candidates(rule, key, can_describe=_can_describe(machine, key))
    for candidate in islice(candidates, _DRY_CANDIDATES if machine.is_dry else None):
        TUNED[key] = candidate
        try:
            seconds = _seconds(machine, heads, kind, kv_dtype)
        # The compiler's passes fail with a plain RuntimeError.
        except (CompilationError, OutOfResources, PTXASError, RuntimeError) as error:
            print(f"    # {candidate}: {type(error).__name__}", file=sys.stderr)
            continue
        finally:
            del TUNED[key]
        if seconds < best_seconds:
            best, best_seconds = candidate, seconds
    gained = (
        f"    # {heads}, {kv_type}, {kind}: rule {rule_seconds * 1e6:.0f} us, "
        f"best {best_seconds * 1e6:.0f} us"
    )
    if best_seconds > (1 - GAIN) * rule_seconds:
        return gained
    return f"{gained}\n{table_line(key, best)}"


def table_line(key: ConfigKey, config: TileConfig) -> str:
    """An entry of TUNED, as the formatter would write it."""
    arguments = f'"{key.arch}", {key.head_dim}, {key.group}, {key.page}'
    tile = f"{config.block_m}, {config.block_n}, {config.num_warps}, {config.num_stages}"
    return (
        f'    ConfigKey({arguments}, "{key.kv_type}", "{key.kind}"): TileConfig(\n'
        f"        {tile}, {config.skips_masks}, {config.uses_descriptors}\n"
        "    ),"
    )


def _seconds(machine: Machine, heads: Heads, kind: Kind, kv_dtype: torch.dtype) -> float:
    """Total time over the loads of a kind; infinite where the result is wrong."""
    check, loads = CHECKS[kind], LOADS[kind]
    if machine.is_dry:
        check, loads = TINY[kind], (TINY[kind],)
    if not AttentionRun(machine, heads, check, kv_dtype).error() <= TOLERANCE:
        return float("inf")
    return sum(
        machine.timer.seconds(AttentionRun(machine, heads, load, kv_dtype).attend) for load in loads
    )


def _can_describe(machine: Machine, key: ConfigKey) -> bool:
    return machine.target.has_descriptors and key.head_dim == padded(key.head_dim)


def _candidates(rule: TileConfig, key: ConfigKey, *, can_describe: bool) -> Iterator[TileConfig]:
    rows = (rule.block_m,) if key.kind == "decode" else (64, 128)
    for block_m, block_n, warps, stages, skips, describes in product(
        rows, (32, 64, 128), (2, 4, 8), (1, 2, 3, 4), (False, True), (False, True)
    ):
        if describes and not (can_describe and block_n == key.page):
            continue
        candidate = TileConfig(block_m, block_n, warps, stages, skips, describes)
        if candidate != rule:
            yield candidate


if __name__ == "__main__":
    sys.exit(main())
