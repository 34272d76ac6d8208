"""Random steps for attention kernels, with everything poisoned that must not be read."""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpuworker.attention.interface import (
    AttentionLayer,
    KvShape,
    LayerKv,
    PreparedStep,
    StepShape,
)
from gpuworker.attention.reference import ReferenceAttention
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.attention.triton.configs import Target

PLAIN = AttentionLayer(0.125)
# Beyond any pool: following it would leave the pool's memory.
POISON_BLOCK = 1 << 24
CPU = torch.device("cpu")
# Few processors: splits stay few, and each takes the interpreter milliseconds.
SMALL_DEVICE = Target("sm80", 4)


@dataclass(frozen=True, slots=True)
class Case:
    """A step: each request's (queries, context length) and the model's shape."""

    requests: Sequence[tuple[int, int]]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    page: int = 32
    layer: AttentionLayer = PLAIN
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    num_padding: int = 0
    seed: int = 0


class Step:
    """A case's tensors: fresh random numbers, NaN in every slot that no context covers."""

    def __init__(self, case: Case, device: torch.device = CPU) -> None:
        self.case = case
        rng = np.random.default_rng(case.seed)
        generator = torch.Generator().manual_seed(case.seed)
        queries = np.array([q for q, _ in case.requests], dtype=np.int32)
        seq_lens = np.array([length for _, length in case.requests], dtype=np.int32)
        num_blocks = -(-seq_lens // case.page)
        pool_blocks = int(num_blocks.sum()) + 3
        ids = rng.permutation(np.arange(1, pool_blocks)).astype(np.int32)
        table = np.full((len(queries), int(num_blocks.max()) + 2), POISON_BLOCK, dtype=np.int32)
        slots = []
        for i, used in enumerate(num_blocks):
            table[i, :used], ids = ids[:used], ids[used:]
            positions = np.arange(seq_lens[i] - queries[i], seq_lens[i])
            slots.append(table[i, positions // case.page] * case.page + positions % case.page)
        start_loc = np.zeros(len(queries) + 1, dtype=np.int32)
        np.cumsum(queries, out=start_loc[1:])
        num_tokens = int(start_loc[-1])
        num_rows = num_tokens + case.num_padding
        self.shape = StepShape(
            start_loc, seq_lens, np.concatenate(slots).astype(np.int64), table, num_rows
        )
        self.kv_shape = KvShape(pool_blocks, case.page, case.num_kv_heads, case.head_dim)

        def random(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(case.dtype)

        # As the model gives them: slices of one product, tokens further apart than their heads.
        heads = random(num_rows, case.num_heads + 2 * case.num_kv_heads, case.head_dim).to(device)
        self.query, self.key, self.value = heads.split(
            [case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1
        )
        pool = self._pool(random)
        self.kv = LayerKv(pool.key.to(device), pool.value.to(device))

    def _pool(self, random: object) -> LayerKv:
        """Pools with numbers where a context reaches before this step, NaN elsewhere."""
        case, size = self.case, self.kv_shape
        dims = (size.num_blocks, size.num_kv_heads, size.block_size, size.head_dim)
        pools = [torch.full(dims, torch.nan), torch.full(dims, torch.nan)]
        for i, (queries, seq_len) in enumerate(case.requests):
            for p in range(seq_len - queries):
                block = self.shape.block_table[i, p // case.page]
                for pool in pools:
                    pool[block, :, p % case.page] = random(case.num_kv_heads, case.head_dim)
        kv_dtype = case.kv_dtype or case.dtype
        return LayerKv(pools[0].to(kv_dtype), pools[1].to(kv_dtype))

    def setup(self, **changes: object) -> AttentionSetup:
        """What a backend for this step is built from."""
        case = self.case
        base = AttentionSetup(
            shape=self.kv_shape,
            num_heads=case.num_heads,
            kv_dtype=self.kv.key.dtype,
            windows=(case.layer.sliding_window,),
            max_num_seqs=len(case.requests),
            max_num_batched_tokens=self.shape.num_padded_tokens,
            max_model_len=int(self.shape.block_table.shape[1]) * case.page,
        )
        return replace(base, **changes)

    def run(self, backend: TritonAttention) -> torch.Tensor:
        """Writes and attends: the tokens' results."""
        prepared = backend.prepare(self.shape)
        prepared.write(self.kv, self.key, self.value)
        return prepared.attend(self.query, self.kv, self.case.layer)

    def expected(self, layer: AttentionLayer | None = None) -> torch.Tensor:
        """What the reference gives for the pool as it is now, in float64."""
        reference = ReferenceAttention().prepare(self.shape)
        return reference.attend(self.query.double(), self.kv, layer or self.case.layer)


class Slots(PreparedStep):
    """A step of which only the slots are known."""

    def __init__(self, slots: torch.Tensor) -> None:
        self._slots = slots

    @property
    def slots(self) -> torch.Tensor:
        return self._slots


def beyond_int32(num_kv_heads: int, page: int, head_dim: int) -> torch.Tensor:
    """A float16 pool of a little more than 2**31 elements; memory is taken where it is touched."""
    block_size = num_kv_heads * page * head_dim
    num_blocks = (1 << 31) // block_size + 64
    pages = mmap.mmap(-1, 2 * num_blocks * block_size)
    return torch.frombuffer(pages, dtype=torch.float16).view(-1, num_kv_heads, page, head_dim)


def poison_allocations(monkeypatch: object) -> None:
    """Makes torch.empty give NaN, so that what a kernel leaves out is seen."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
