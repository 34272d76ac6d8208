"""The efficiency of the GPU kernels: attention, and the passes between matrix products.

Every share is relative to a peak measured on the same device in the same run. Kernels are checked
against the reference before they are timed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu_machine import Machine, Peaks
from benchmarks.tables import Table
from gpuworker.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    KvShape,
    LayerKv,
    PreparedStep,
    StepShape,
)
from gpuworker.attention.reference import ReferenceAttention
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.ops import Draws, HeadNorms, RopeTables, StepTokens

# Several times the largest cache.
_COLD_BYTES = 512 << 20
_TOLERANCE = 2e-2
PAGE = 64


@dataclass(frozen=True, slots=True)
class Heads:
    """The model parameters that attention depends on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __str__(self) -> str:
        return f"{self.num_heads} / {self.num_kv_heads} heads of {self.head_dim}"


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one step, all with the same number of queries and the same context length."""

    num_reqs: int
    num_queries: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class Loads:
    """The shapes to time; `checks` run first and are compared with the reference."""

    checks: tuple[Load, ...]
    decodes: tuple[Load, ...]
    verifies: tuple[Load, ...]
    chunks: tuple[Load, ...]


FULL = Loads(
    checks=(Load(3, 1, 700), Load(2, 5, 700), Load(2, 150, 300)),
    decodes=tuple(
        Load(n, 1, length)
        for n, length in ((1, 8192), (1, 131072), (8, 8192), (16, 4096), (64, 4096), (256, 2048))
    ),
    verifies=tuple(Load(n, 5, 4096) for n in (1, 16, 64)),
    chunks=(Load(1, 512, 512), Load(4, 2048, 2048), Load(1, 8192, 8192), Load(1, 2048, 32768)),
)
TINY = Loads(
    checks=(Load(2, 1, 70), Load(1, 9, 20)),
    decodes=(Load(1, 1, 65),),
    verifies=(Load(1, 3, 9),),
    chunks=(Load(1, 40, 40),),
)
FULL_HEADS = (Heads(32, 8, 128), Heads(9, 3, 64))
TINY_HEADS = (Heads(4, 2, 16),)


class AttentionRun:
    """One load's tensors and prepared step on the device."""

    def __init__(
        self,
        machine: Machine,
        heads: Heads,
        load: Load,
        kv_dtype: torch.dtype,
        make: Callable[[AttentionSetup, Machine], AttentionBackend] | None = None,
    ) -> None:
        self.shape = _step_shape(load)
        num_blocks = load.num_reqs * self.shape.block_table.shape[1] + 1
        size = (num_blocks, heads.num_kv_heads, PAGE, heads.head_dim)
        # One pool per layer, as in a model: no cache holds a pool until its next use.
        pool_bytes = 2 * math.prod(size) * kv_dtype.itemsize
        num_layers = min(-(-_COLD_BYTES // pool_bytes), machine.timer.num_calls)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=machine.device, dtype=machine.dtype)

        self._layers = [
            LayerKv(random(*size).to(kv_dtype), random(*size).to(kv_dtype))
            for _ in range(num_layers)
        ]
        self._next = 0
        self.query = random(self.shape.num_tokens, heads.num_heads, heads.head_dim)
        self.layer = AttentionLayer(heads.head_dim**-0.5)
        setup = AttentionSetup(
            shape=KvShape(num_blocks, PAGE, heads.num_kv_heads, heads.head_dim),
            num_heads=heads.num_heads,
            kv_dtype=kv_dtype,
            windows=(None,),
            max_num_seqs=load.num_reqs,
            max_num_batched_tokens=self.shape.num_tokens,
            max_model_len=load.seq_len,
        )
        # The backend is kept alive, because graphs read its buffers.
        self.backend = (make or _triton)(setup, machine)
        self.step: PreparedStep = self.backend.prepare(self.shape)

    def attend(self) -> torch.Tensor:
        """Attention of the next layer."""
        kv = self._layers[self._next]
        self._next = (self._next + 1) % len(self._layers)
        return self.step.attend(self.query, kv, self.layer)

    def error(self) -> float:
        """Largest difference from the reference, in the first layer."""
        kv = self._layers[0]
        expected = ReferenceAttention().prepare(self.shape).attend(self.query, kv, self.layer)
        ours = self.step.attend(self.query, kv, self.layer)
        return float((ours.float() - expected.float()).abs().max())


def _triton(setup: AttentionSetup, machine: Machine) -> AttentionBackend:
    return TritonAttention(setup, machine.target, machine.device)


def _step_shape(load: Load) -> StepShape:
    blocks_a_request = -(-load.seq_len // PAGE)
    num_blocks = load.num_reqs * blocks_a_request + 1
    ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).astype(np.int32)
    table = ids.reshape(load.num_reqs, blocks_a_request)
    positions = np.arange(load.seq_len - load.num_queries, load.seq_len)
    slots = table[:, positions // PAGE] * PAGE + positions % PAGE
    return StepShape(
        np.arange(load.num_reqs + 1, dtype=np.int32) * load.num_queries,
        np.full(load.num_reqs, load.seq_len, dtype=np.int32),
        slots.reshape(-1).astype(np.int64),
        table,
        load.num_reqs * load.num_queries,
    )


def attention_tables(
    machine: Machine,
    peaks: Peaks,
    heads: Heads,
    kv_dtype: torch.dtype,
    make_peer: Callable[[AttentionSetup, Machine], AttentionBackend] | None = None,
) -> list[Table]:
    """Times decodes, verifies and prefills for one head layout, beside a peer if installed.

    Raises:
        SystemExit: the kernels are wrong.
    """
    loads = TINY if machine.is_dry else FULL
    name = f"{heads}, {str(kv_dtype).removeprefix('torch.')}"
    for load in loads.checks:
        error = AttentionRun(machine, heads, load, kv_dtype).error()
        if not error <= _TOLERANCE:
            raise SystemExit(f"{name}: {load} is wrong by {error}: nothing is timed")
    token_bytes = 2 * heads.num_kv_heads * heads.head_dim * kv_dtype.itemsize

    def decode_share(load: Load, seconds: float) -> float:
        return load.num_reqs * load.seq_len * token_bytes / seconds / peaks.copy

    def chunk_share(load: Load, seconds: float) -> float:
        seen = load.num_queries * (2 * load.seq_len - load.num_queries + 1) // 2
        return 4 * load.num_reqs * seen * heads.num_heads * heads.head_dim / seconds / peaks.matrix

    tables = []
    for title, of_kind, share in (
        ("decode, share of copy bandwidth (goal 85 %)", loads.decodes, decode_share),
        ("verify, share of copy bandwidth", loads.verifies, decode_share),
        ("prefill, share of matrix peak (goal 50 %)", loads.chunks, chunk_share),
    ):
        table = Table(
            f"{name}: {title}", ("requests", "queries", "context", "us", "share %", "flashinfer us")
        )
        for load in of_kind:
            cells = (load.num_reqs, load.num_queries, load.seq_len)
            if load.num_reqs * load.seq_len * token_bytes > machine.free_bytes() // 4:
                table.rows.append((*cells, "", "does not fit", ""))
                continue
            seconds = machine.timer.seconds(AttentionRun(machine, heads, load, kv_dtype).attend)
            peer: str | float = "not installed"
            if make_peer is not None:
                run = AttentionRun(machine, heads, load, kv_dtype, make_peer)
                peer = machine.timer.seconds(run.attend) * 1e6
            table.rows.append((*cells, seconds * 1e6, 100 * share(load, seconds), peer))
        tables.append(table)
    return tables


def op_table(machine: Machine, peaks: Peaks) -> Table:
    """Times other kernels, as shares of the bandwidth for the bytes that they must move."""
    table = Table(
        "other kernels, share of copy bandwidth (few rows stay in the cache)",
        ("kernel", "rows", "us", "share %"),
    )
    tokens, samples = ((2,), (1,)) if machine.is_dry else ((1, 256, 4096), (1, 64, 256))
    for num_rows, calls in [
        *((n, _layer_calls(machine, n)) for n in tokens),
        *((n, _sample_calls(machine, n)) for n in samples),
    ]:
        for name, (call, num_bytes) in calls.items():
            seconds = machine.timer.seconds(call)
            share = num_bytes / seconds / peaks.copy
            table.rows.append((name, num_rows, seconds * 1e6, 100 * share))
    return table


# By name: a call, and the bytes that the call must read and write.
_Calls = dict[str, tuple[Callable[[], object], int]]


def _layer_calls(machine: Machine, num_tokens: int) -> _Calls:
    """The sizes of an 8-billion-parameter Llama or Qwen."""
    ops, device = TritonOps(), machine.device
    size, inner, dim = (64, 64, 16) if machine.is_dry else (4096, 14336, 128)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=machine.dtype)

    hidden, update = random(num_tokens, size), random(num_tokens, size)
    weight = torch.ones(size, device=device)
    gate_up, qkv = random(num_tokens, 2 * inner), random(num_tokens, 48, dim)
    pool = random(-(-num_tokens // PAGE), 8, PAGE, dim)
    kv = LayerKv(pool, pool.clone())
    tokens = StepTokens(torch.arange(num_tokens, device=device), _Slots(num_tokens, device))
    norms = HeadNorms(torch.ones(dim, device=device), torch.ones(dim, device=device), 1e-6)
    angles = torch.rand(num_tokens, dim // 2, device=device)
    rope = RopeTables(angles.cos(), angles.sin())
    return {
        "add_rms_norm": (
            lambda: ops.add_rms_norm(hidden, update, weight, 1e-5),
            4 * hidden.nbytes,
        ),
        "silu gate": (lambda: ops.gate(gate_up, "silu"), gate_up.nbytes * 3 // 2),
        "rotate_and_write": (
            lambda: ops.rotate_and_write(qkv, kv, tokens, norms, rope),
            2 * qkv.nbytes,
        ),
    }


class _Slots(PreparedStep):
    """A step that defines only slots, the first of the pool."""

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self._slots = torch.arange(num_tokens, device=device, dtype=torch.int32)

    @property
    def slots(self) -> torch.Tensor:
        return self._slots


def _sample_calls(machine: Machine, num_samples: int) -> _Calls:
    vocab_size = 300 if machine.is_dry else 128256
    logits = 3 * torch.randn(num_samples, vocab_size, device=machine.device)

    def call(top_k: int, top_p: float) -> tuple[Callable[[], object], int]:
        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_samples,), value, dtype=dtype, device=machine.device)

        draws = Draws(
            seeds=torch.arange(num_samples, device=machine.device),
            positions=full(3, torch.int64),
            is_drawn=full(1, torch.int32),
            numbers={
                "top_k": full(top_k, torch.int32),
                "top_p": full(top_p, torch.float64),
                "min_p": full(0, torch.float64),
            },
        )
        return lambda: TritonOps().sample(logits, draws), logits.nbytes

    return {
        "sample": call(0, 1.0),
        "sample top_k 50": call(50, 1.0),
        "sample top_p 0.9": call(0, 0.9),
    }
