"""The tile sizes of attention by device: a table, never a search at run time.

`TUNED` holds the best configurations that `benchmarks/kernels_tune.py` measured on a device. Keys
that were not measured get a configuration by rule. The rules follow from the compiler's output
(registers, spills, tensor-core instructions; see `make check-kernels`). The kinds differ in rows
per tile: decodes and drafts fill 16 rows, chunks 64 or more, where wide matrix instructions apply.
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["decode", "chunk"]
KvType = Literal["wide", "float8"]

# A request with at most this many rows (queries times group) is of kind decode: two tiles.
MAX_DECODE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of device.

    arch: "sm80", "sm90", "sm100" or an AMD name such as "gfx942".
    num_processors: streaming multiprocessors or compute units.
    """

    arch: str
    num_processors: int

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def has_descriptors(self) -> bool:
        """Whether the device has the bulk tensor copy engine."""
        return not self.is_amd and int(self.arch[2:]) >= 90

    @property
    def has_float8(self) -> bool:
        """Whether the hardware converts eight-bit floats; Triton refuses them on other devices."""
        return self.arch == "gfx942" or (not self.is_amd and int(self.arch[2:]) >= 89)


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """What a configuration depends on; group is the number of query heads per KV head."""

    arch: str
    head_dim: int
    group: int
    page: int
    kv_type: KvType
    kind: Kind


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The compile-time parameters of the attention kernel.

    skips_masks: fully visible tiles run in a second loop without masks, which is more code.
    uses_descriptors: the bulk copy engine loads pages; block_n must then equal the page.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    skips_masks: bool
    uses_descriptors: bool


# Written by the tuner, sorted; a device that was not measured has no entries.
TUNED: dict[ConfigKey, TileConfig] = {}


def tile_config(target: Target, key: ConfigKey) -> TileConfig:
    """The configuration for a device, model and kind."""
    tuned = TUNED.get(key)
    if tuned is not None:
        return tuned
    return _decode_rule(target, key) if key.kind == "decode" else _chunk_rule(target, key)


def padded(n: int) -> int:
    """The power of two that a tile dimension is padded to, at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def _decode_rule(target: Target, key: ConfigKey) -> TileConfig:
    head_dim = padded(key.head_dim)
    # One page per tile where possible: the kernel then loads one block id per tile, and all other
    # addresses are affine.
    block_n = min(max(key.page, 32), 64) if head_dim <= 128 else max(min(key.page, 32), 16)
    uses_descriptors = _can_use_descriptors(target, key) and key.page == block_n
    return TileConfig(
        block_m=padded(key.group),
        block_n=block_n,
        num_warps=4,
        num_stages=2 if target.is_amd else 3,
        skips_masks=uses_descriptors,
        uses_descriptors=uses_descriptors,
    )


def _chunk_rule(target: Target, key: ConfigKey) -> TileConfig:
    is_wide = padded(key.head_dim) > 128
    # Before Hopper, matrix products read their operands from registers, and the loops for masked
    # and unmasked tiles together spill. A single masked loop does not spill with any window or cap.
    is_tight = not target.is_amd and not target.has_descriptors
    block_n = 32 if is_wide or (is_tight and key.page < 64) else 64
    return TileConfig(
        block_m=64 if is_wide else 128,
        block_n=block_n,
        num_warps=4 if is_wide and not is_tight else 8,
        num_stages=1 if target.is_amd else (2 if is_tight else 3),
        skips_masks=not is_tight,
        uses_descriptors=_can_use_descriptors(target, key) and key.page == block_n,
    )


def _can_use_descriptors(target: Target, key: ConfigKey) -> bool:
    return target.has_descriptors and key.head_dim == padded(key.head_dim)
