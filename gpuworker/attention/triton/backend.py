"""The Triton attention backend: sends a step's work lists to the device and launches the kernels.

The buffer layout and the grids of a step without chunks depend on num_padded_tokens alone, so that
a CUDA graph captured from the step can be replayed for other requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from gpuworker.attention.interface import (
    FLOAT8_TYPES,
    AttentionBackend,
    AttentionLayer,
    KvShape,
    LayerKv,
    PreparedStep,
    StepShape,
)
from gpuworker.attention.triton import kernels, work
from gpuworker.attention.triton.configs import (
    MAX_DECODE_ROWS,
    ConfigKey,
    Kind,
    Target,
    TileConfig,
    padded,
    tile_config,
)
from gpuworker.attention.triton.device import float8_type
from gpuworker.core.plan import Int32Array
from gpuworker.device.staging import StagingRing
from gpuworker.kernels.launch import HeldKernel

_LOG2_E = math.log2(math.e)
# About how many programs run on a processor at a time; long contexts are split to reach that.
_PROGRAMS_A_PROCESSOR: dict[Kind, int] = {"decode": 4, "chunk": 1}
_MIN_KEYS: dict[Kind, int] = {"decode": 128, "chunk": 512}
_KINDS: tuple[Kind, Kind] = ("decode", "chunk")
_BLOCK_SPLITS = 16
_ALIGNED = 4  # integers


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSetup:
    """The model and limits that a worker's attention is built for.

    windows: the distinct sliding windows of the layers; None for layers without a window.
    """

    shape: KvShape
    num_heads: int
    kv_dtype: torch.dtype
    windows: Sequence[int | None]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


class TritonAttention(AttentionBackend):
    """Paged attention on one device.

    Args:
        setup: model and limits.
        target: the kind of device.
        device: the device of all tensors.

    Raises:
        ValueError: the device does not support the KV pool's type.
    """

    def __init__(self, setup: AttentionSetup, target: Target, device: torch.device) -> None:
        if setup.kv_dtype in FLOAT8_TYPES and setup.kv_dtype != float8_type(target):
            raise ValueError(f"kv-cache-dtype: {target.arch} has no {setup.kv_dtype}")
        shape = setup.shape
        self._setup = setup
        self._target = target
        self._group = setup.num_heads // shape.num_kv_heads
        self._head_dim_padded = padded(shape.head_dim)
        self._configs: dict[Kind, TileConfig] = {kind: self._config(kind) for kind in _KINDS}
        self._max_decode_rows = max(MAX_DECODE_ROWS, self._configs["decode"].block_m)
        self.tiles = {kind: self._tile_shape(kind) for kind in _KINDS}
        self._kernels: dict[tuple[object, ...], HeldKernel] = {}
        self._descriptors: dict[int, TensorDescriptor] = {}
        self._staging = StagingRing(self._max_step_size(), device)
        rows = sum(
            work.ListSizes.of(setup.max_num_batched_tokens, tile).num_partial_rows
            for tile in self.tiles.values()
        )
        self._partial_out = torch.empty(
            (rows, setup.num_heads, self._head_dim_padded), dtype=torch.float32, device=device
        )
        self._partial_lse = torch.empty((rows, setup.num_heads), dtype=torch.float32, device=device)
        self._merge = HeldKernel(
            kernels.merge_splits,
            {
                "NUM_HEADS": setup.num_heads,
                "HEAD_DIM": shape.head_dim,
                "HEAD_DIM_PADDED": self._head_dim_padded,
                "BLOCK_SPLITS": _BLOCK_SPLITS,
            },
            {"num_warps": 4},
        )

    def prepare(self, shape: StepShape) -> "TritonStep":
        lists = {window: self._build(shape, window) for window in self._setup.windows}
        # Sections begin at multiples of 16 bytes: the kernels are compiled for that alignment.
        size = -(-shape.num_padded_tokens // _ALIGNED) * _ALIGNED
        sections = {}
        for window, (_, counts) in lists.items():
            sections[window] = _WorkSections.at(size, counts)
            size = sections[window].end
        values = self._staging.reserve(size + shape.block_table.size)
        values[: shape.num_padded_tokens] = shape.padded_slots()
        for window, (arrays, _) in lists.items():
            sections[window].fill(values, arrays)
        values[size:] = shape.block_table.reshape(-1)
        return TritonStep(self, shape.num_padded_tokens, self._staging.send(), sections, size)

    def _build(
        self, shape: StepShape, window: int | None
    ) -> tuple[tuple[Int32Array, Int32Array, Int32Array], tuple[int, int, int]]:
        """Decode items, chunk items and merges, and the size reserved for each list.

        Decode items also clear padding tokens. Without chunks, the reserved sizes depend on
        num_padded_tokens alone.
        """
        starts = shape.query_start_loc
        is_chunk = (starts[1:] - starts[:-1]) * self._group > self._max_decode_rows
        tile = self.tiles["decode"]
        decode = work.build(shape, (~is_chunk).nonzero()[0], tile, window)
        items = decode.items
        num_unused = shape.num_padded_tokens - shape.num_tokens
        if num_unused:
            cleared = work.clear_items(shape.num_tokens, num_unused, tile)
            items = np.concatenate((items, cleared))
        if not is_chunk.any():
            sizes = work.ListSizes.of(shape.num_padded_tokens, tile)
            room = (sizes.num_items, 0, sizes.num_merges)
            return (items, decode.items[:0], decode.merges), room
        chunk = work.build(
            shape, is_chunk.nonzero()[0], self.tiles["chunk"], window, decode.num_partial_rows
        )
        merges = np.concatenate((decode.merges, chunk.merges))
        return (items, chunk.items, merges), (len(items), len(chunk.items), len(merges))

    def _config(self, kind: Kind) -> TileConfig:
        shape = self._setup.shape
        is_float8 = self._setup.kv_dtype in FLOAT8_TYPES
        key = ConfigKey(
            self._target.arch,
            shape.head_dim,
            self._group,
            shape.block_size,
            "float8" if is_float8 else "wide",
            kind,
        )
        return tile_config(self._target, key)

    def _tile_shape(self, kind: Kind) -> work.TileShape:
        config = self._configs[kind]
        programs = self._target.num_processors * _PROGRAMS_A_PROCESSOR[kind]
        return work.TileShape(
            block_queries=config.block_m // self._group,
            block_keys=config.block_n,
            target_items=-(-programs // self._setup.shape.num_kv_heads),
            min_keys=max(_MIN_KEYS[kind], config.block_n),
        )

    def _max_step_size(self) -> int:
        """Number of integers that the largest step sends to the device."""
        setup = self._setup
        sizes = [work.ListSizes.of(setup.max_num_batched_tokens, t) for t in self.tiles.values()]
        items = sum(size.num_items for size in sizes) * work.ITEM_FIELDS
        merges = sum(size.num_merges for size in sizes) * work.MERGE_FIELDS
        table = setup.max_num_seqs * -(-setup.max_model_len // setup.shape.block_size)
        lists = len(setup.windows) * (items + merges)
        return setup.max_num_batched_tokens + _ALIGNED + lists + table

    def launch_attention(
        self,
        kind: Kind,
        num_items: int,
        tensors: "_Tensors",
        layer: AttentionLayer,
    ) -> None:
        """Launches the attention kernel over the items of one kind."""
        config = self._configs[kind]
        kv = tensors.kv
        key_pool, value_pool = kv.key, kv.value
        if config.uses_descriptors:
            key_pool, value_pool = self._descriptor(kv.key), self._descriptor(kv.value)
        scale = layer.scale * _LOG2_E
        cap = 0.0
        if layer.soft_cap is not None:
            scale, cap = 2 * scale / layer.soft_cap, layer.soft_cap * _LOG2_E
        kernel = self._attention_kernel(kind, tensors.query.stride(0), layer)
        kernel(
            (num_items * self._setup.shape.num_kv_heads, 1, 1),
            tensors.out,
            tensors.query,
            key_pool,
            value_pool,
            tensors.tables,
            tensors.items,
            self._partial_out,
            self._partial_lse,
            scale,
            cap,
            layer.sliding_window or 0,
        )

    def launch_merge(self, num_merges: int, out: torch.Tensor, merges: torch.Tensor) -> None:
        """Launches the kernel that merges splits."""
        self._merge(
            (num_merges * self._setup.num_heads, 1, 1),
            out,
            self._partial_out,
            self._partial_lse,
            merges,
        )

    def _attention_kernel(self, kind: Kind, stride: int, layer: AttentionLayer) -> HeldKernel:
        has_cap, has_window = layer.soft_cap is not None, layer.sliding_window is not None
        name = (kind, stride, has_cap, has_window)
        kernel = self._kernels.get(name)
        if kernel is None:
            shape, config = self._setup.shape, self._configs[kind]
            constants = {
                "QUERY_STRIDE": stride,
                "NUM_KV_HEADS": shape.num_kv_heads,
                "GROUP": self._group,
                "HEAD_DIM": shape.head_dim,
                "HEAD_DIM_PADDED": self._head_dim_padded,
                "PAGE": shape.block_size,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "HAS_CAP": has_cap,
                "HAS_WINDOW": has_window,
                "SKIPS_MASKS": config.skips_masks,
                "USES_DESCRIPTORS": config.uses_descriptors,
            }
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
            kernel = HeldKernel(kernels.paged_attention, constants, options)
            self._kernels[name] = kernel
        return kernel

    def _descriptor(self, pool: torch.Tensor) -> TensorDescriptor:
        """A bulk-copy descriptor of a pool with pages as rows; created once per layer."""
        descriptor = self._descriptors.get(pool.data_ptr())
        if descriptor is None:
            shape = self._setup.shape
            descriptor = TensorDescriptor.from_tensor(
                pool.view(-1, shape.head_dim), [shape.block_size, shape.head_dim]
            )
            self._descriptors[pool.data_ptr()] = descriptor
        return descriptor


@dataclass(frozen=True, slots=True)
class _WorkSections:
    """Offsets and sizes of one window's decode items, chunk items and merges in the buffer."""

    starts: tuple[int, int, int]
    counts: tuple[int, int, int]
    end: int

    @staticmethod
    def at(start: int, counts: tuple[int, int, int]) -> "_WorkSections":
        """Three consecutive sections that begin at `start`."""
        chunks = start + counts[0] * work.ITEM_FIELDS
        merges = chunks + counts[1] * work.ITEM_FIELDS
        return _WorkSections(
            (start, chunks, merges), counts, merges + counts[2] * work.MERGE_FIELDS
        )

    def fill(self, values: Int32Array, arrays: tuple[Int32Array, Int32Array, Int32Array]) -> None:
        """Copies arrays into their sections and zeros the rest of each section."""
        for start, end, array in zip(
            self.starts, (*self.starts[1:], self.end), arrays, strict=True
        ):
            used = start + array.size
            values[start:used] = array.reshape(-1)
            values[used:end] = 0


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a launch; see `kernels.paged_attention`."""

    out: torch.Tensor
    query: torch.Tensor
    kv: LayerKv
    tables: torch.Tensor
    items: torch.Tensor


class TritonStep(PreparedStep):
    """One prepared step; buffer is int32: slots, each window's sections, block tables."""

    def __init__(
        self,
        backend: TritonAttention,
        num_padded_tokens: int,
        buffer: torch.Tensor,
        lists: dict[int | None, _WorkSections],
        tables_start: int,
    ) -> None:
        self._backend = backend
        self._slots = buffer[:num_padded_tokens]
        self._tables = buffer[tables_start:]
        self._lists = {
            window: (sections.counts, [buffer[start:] for start in sections.starts])
            for window, sections in lists.items()
        }

    @property
    def has_fixed_layout(self) -> bool:
        return not any(counts[1] for counts, _ in self._lists.values())

    def counts(self, window: int | None) -> tuple[int, int, int]:
        """Decode items, chunk items and merges for layers with this window; they size the grids."""
        return self._lists[window][0]

    @property
    def slots(self) -> torch.Tensor:
        return self._slots

    def attend(self, query: torch.Tensor, kv: LayerKv, layer: AttentionLayer) -> torch.Tensor:
        _check_packed(query)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        counts, sections = self._lists[layer.sliding_window]
        for kind, count, items in zip(_KINDS, counts, sections, strict=False):
            if count:
                tensors = _Tensors(out, query, kv, self._tables, items)
                self._backend.launch_attention(kind, count, tensors, layer)
        if counts[2]:
            self._backend.launch_merge(counts[2], out, sections[2])
        return out


def _check_packed(heads: torch.Tensor) -> None:
    """Asserts that a token's heads are contiguous; tokens may be strided."""
    if heads.stride(2) != 1 or heads.stride(1) != heads.shape[2]:
        raise ValueError(f"heads of a token are not packed: strides {heads.stride()}")
