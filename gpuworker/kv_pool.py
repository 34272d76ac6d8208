"""The paged KV cache's memory: how many blocks fit, and the tensors that hold them."""

import math
import mmap
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from gpuworker.attention.interface import KvShape, LayerKv
from gpuworker.models.config import ModelConfig

# Share of the memory that is free once the model is loaded. Other services, the page cache and
# activations need memory, too; pages are only taken when first written.
CPU_MEMORY_SHARE = 0.4


class KvPoolError(Exception):
    """There is no room for a useful pool; the message says what is missing."""


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values."""
    attention = config.attention
    per_token = 2 * len(config.layers) * attention.num_kv_heads * attention.head_dim
    return per_token * block_size * dtype.itemsize


def num_blocks_that_fit(pool_bytes: int, bytes_per_block: int, max_useful_blocks: int) -> int:
    """Blocks of a pool of this many bytes, the null block included.

    Args:
        pool_bytes: memory for the pool.
        bytes_per_block: see block_bytes.
        max_useful_blocks: blocks that all rows at full length need.

    Raises:
        KvPoolError: not even one block besides the null block fits.
    """
    num_blocks = min(pool_bytes // bytes_per_block, max_useful_blocks + 1)
    if num_blocks < 2:
        raise KvPoolError(
            f"{pool_bytes} bytes hold {num_blocks} KV blocks of {bytes_per_block} bytes, at least "
            "2 are needed: give more memory or a smaller block size"
        )
    return num_blocks


def host_bytes() -> int:
    """Memory that the pool may take on a CPU, now; for a GPU, see `memory_profile`."""
    return int(_available_host_bytes() * CPU_MEMORY_SHARE)


def allocate(
    config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Sequence[LayerKv]:
    """One pool per layer, zeroed. On a CPU a page is taken only when it is first written."""
    shape = kv_shape(config, num_blocks, block_size)
    size = (shape.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)

    def pool() -> torch.Tensor:
        if device.type != "cpu":
            return torch.zeros(size, dtype=dtype, device=device)
        # torch.zeros would write every page of what may be most of the machine's memory.
        num_bytes = math.prod(size) * dtype.itemsize
        try:
            pages = mmap.mmap(-1, num_bytes)
        except (OSError, OverflowError) as error:
            raise KvPoolError(
                f"{num_blocks} KV blocks take {num_bytes} bytes a layer, twice, which cannot be "
                f"had ({error}): give fewer"
            ) from error
        return torch.frombuffer(pages, dtype=dtype).view(size)

    return [LayerKv(pool(), pool()) for _ in config.layers]


def kv_shape(config: ModelConfig, num_blocks: int, block_size: int) -> KvShape:
    """The shape of each layer's pool."""
    attention = config.attention
    return KvShape(num_blocks, block_size, attention.num_kv_heads, attention.head_dim)


def _available_host_bytes() -> int:
    """Memory that the kernel and the control group leave; 2 GiB where neither tells."""
    limits = [2 << 30]
    if sys.platform == "linux":
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
        fields = dict(line.split(":", 1) for line in meminfo.splitlines())
        limits = [int(fields["MemAvailable"].split()[0]) * 1024]
        group = _control_group_bytes(Path("/sys/fs/cgroup"))
        if group is not None:
            limits.append(group)
    return min(limits)


def _control_group_bytes(group: Path) -> int | None:
    """Bytes left below memory.max (control groups v2), or None where there is no limit."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(int(limit) - used, 0)
