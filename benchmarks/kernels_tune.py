"""Finds attention's tile sizes for the GPU that is here, and prints lines for the table.

Each candidate is timed on loads of its kind; those that do not compile, spill into time or are
wrong lose by themselves. The lines go into `TUNED` of gpuworker/attention/triton/configs.py.

    python -m benchmarks.kernels_tune --heads 32 8 128
"""

import argparse
import sys
from collections.abc import Iterator
from itertools import product

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks.kernels import NO_GPU, AttentionRun, Load, Model, Timer
from gpuworker.attention.triton.configs import (
    TUNED,
    ConfigKey,
    Kind,
    Target,
    TileConfig,
    padded,
    tile_config,
)
from gpuworker.attention.triton.device import detect

PAGE = 64
LOADS: dict[Kind, tuple[Load, ...]] = {
    "decode": (Load(1, 1, 32768), Load(16, 1, 4096), Load(128, 1, 2048), Load(16, 5, 4096)),
    "chunk": (Load(1, 2048, 2048), Load(4, 512, 4096)),
}
TOLERANCE = 2e-2
# A candidate must beat the rule by this to be worth a line.
GAIN = 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs=3, action="append", metavar=("H", "KV", "DIM"))
    parser.add_argument("--float8", action="store_true", help="eight-bit keys and values")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("kernels_tune: there is no GPU here, nothing was measured", file=sys.stderr)
        return NO_GPU
    target = detect(torch.device("cuda"))
    float8 = torch.float8_e4m3fnuz if target.is_amd else torch.float8_e4m3fn
    for heads in options.heads or [(32, 8, 128)]:
        model = Model("tuned", *heads, float8 if options.float8 else torch.bfloat16)
        for kind in LOADS:
            line = _tune(model, kind, target)
            if line is not None:
                print(line, flush=True)
    return 0


def _tune(model: Model, kind: Kind, target: Target) -> str | None:
    """The table's line for a model and kind, or None where the rule is as good."""
    group = model.num_heads // model.num_kv_heads
    kv_type = "wide" if model.kv_dtype == torch.bfloat16 else "float8"
    key = ConfigKey(target.arch, model.head_dim, group, PAGE, kv_type, kind)
    TUNED.pop(key, None)
    rule = tile_config(target, key)
    timer = Timer(repeats=10)
    rule_seconds = best_seconds = _seconds(model, kind, target, timer)
    best = rule
    for candidate in _candidates(rule, key, target):
        TUNED[key] = candidate
        try:
            seconds = _seconds(model, kind, target, timer)
        except (CompilationError, OutOfResources, PTXASError):
            continue
        finally:
            del TUNED[key]
        if seconds < best_seconds:
            best, best_seconds = candidate, seconds
    print(
        f"# {model.num_heads}/{model.num_kv_heads} heads of {model.head_dim}, {kind}: rule "
        f"{rule_seconds * 1e6:.0f} us, best {best_seconds * 1e6:.0f} us"
    )
    if best_seconds > (1 - GAIN) * rule_seconds:
        return None
    return f"    {key}: {best},"


def _seconds(model: Model, kind: Kind, target: Target, timer: Timer) -> float:
    """Time over the loads of a kind; infinite where the result is wrong."""
    check = Load(2, 1, 700) if kind == "decode" else Load(2, 150, 300)
    if not AttentionRun(model, target, check).error() <= TOLERANCE:
        return float("inf")
    return sum(timer.seconds(AttentionRun(model, target, load).attend) for load in LOADS[kind])


def _candidates(rule: TileConfig, key: ConfigKey, target: Target) -> Iterator[TileConfig]:
    rows = (rule.block_m,) if key.kind == "decode" else (64, 128)
    can_describe = target.has_descriptors and key.head_dim == padded(key.head_dim)
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
