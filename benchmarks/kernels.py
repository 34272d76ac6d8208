"""What the GPU kernels make of the GPU that is here: `make bench-gpu`.

Every share is of something measured on the same device in the same run: copy bandwidth of a large
device-to-device copy, matrix peak of a large bfloat16 product. Kernels are checked against the
reference before they are timed. Without a GPU nothing is measured and the exit status is 2.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpuworker.attention.interface import AttentionLayer, KvShape, LayerKv, StepShape
from gpuworker.attention.reference import ReferenceAttention
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.attention.triton.configs import Target
from gpuworker.attention.triton.device import detect
from gpuworker.kernels.fused import TritonOps
from gpuworker.kernels.ops import Draws, HeadNorms, RopeTables, TokenPlaces

NO_GPU = 2
# Larger than any cache, small enough for any GPU that serves models.
_COPY_BYTES = 2 << 30
_MATRIX_SIZE = 8192
# Several times the largest cache.
_COLD_BYTES = 512 << 20
_TOLERANCE = 2e-2
_PAGE = 64


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model its kernels depend on."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one step: equally many queries over equally long contexts."""

    num_reqs: int
    num_queries: int
    seq_len: int


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured: bytes moved a second (read plus written), operations a second."""

    copy: float
    matrix: float


DECODES = [
    Load(n, 1, length)
    for n, length in ((1, 8192), (1, 131072), (8, 8192), (16, 4096), (64, 4096), (256, 2048))
]
VERIFIES = [Load(n, 5, 4096) for n in (1, 16, 64)]
CHUNKS = [
    Load(n, queries, length)
    for n, queries, length in ((1, 512, 512), (4, 2048, 2048), (1, 8192, 8192), (1, 2048, 32768))
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each (median)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench-gpu: there is no GPU here, nothing was measured", file=sys.stderr)
        return NO_GPU
    device = torch.device("cuda")
    target = detect(device)
    timer = Timer(options.repeats)
    peaks = Peaks(_copy_peak(timer), _matrix_peak(timer))
    print(f"{torch.cuda.get_device_name()}, {target.arch}, {target.num_processors} processors")
    print(f"measured copy {peaks.copy / 1e9:.0f} GB/s, matrix {peaks.matrix / 1e12:.0f} TFLOP/s\n")
    models = [Model("32 / 8 heads of 128", 32, 8, 128), Model("9 / 3 heads of 64", 9, 3, 64)]
    if target.has_float8:
        float8 = torch.float8_e4m3fnuz if target.is_amd else torch.float8_e4m3fn
        models.append(Model("32 / 8 heads of 128, float8", 32, 8, 128, float8))
    for model in models:
        _attention_tables(model, target, timer, peaks)
    _op_table(timer, peaks)
    return 0


class Timer:
    """Times what is launched, without the host: several calls captured in one CUDA graph."""

    CALLS = 10

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of one call."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(self.CALLS):
                call()
        times = []
        for _ in range(self._repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / self.CALLS)
        return statistics.median(times)


def _copy_peak(timer: Timer) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / timer.seconds(lambda: target.copy_(source))


def _matrix_peak(timer: Timer) -> float:
    left, right = (
        torch.randn(_MATRIX_SIZE, _MATRIX_SIZE, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    )
    out = torch.empty_like(left)
    return 2 * _MATRIX_SIZE**3 / timer.seconds(lambda: torch.matmul(left, right, out=out))


class AttentionRun:
    """One load's tensors and prepared step on the device."""

    def __init__(self, model: Model, target: Target, load: Load) -> None:
        num_tokens = load.num_reqs * load.num_queries
        blocks_a_request = -(-load.seq_len // _PAGE)
        num_blocks = load.num_reqs * blocks_a_request + 1
        ids = np.random.default_rng(0).permutation(np.arange(1, num_blocks)).astype(np.int32)
        table = ids.reshape(load.num_reqs, blocks_a_request)
        positions = np.arange(load.seq_len - load.num_queries, load.seq_len)
        slots = table[:, positions // _PAGE] * _PAGE + positions % _PAGE
        self.shape = StepShape(
            np.arange(load.num_reqs + 1, dtype=np.int32) * load.num_queries,
            np.full(load.num_reqs, load.seq_len, dtype=np.int32),
            slots.reshape(-1).astype(np.int64),
            table,
            num_tokens,
        )
        kv_shape = KvShape(num_blocks, _PAGE, model.num_kv_heads, model.head_dim)
        size = (num_blocks, model.num_kv_heads, _PAGE, model.head_dim)
        # As the layers of a model: by the time a pool is read again, no cache holds it.
        pool_bytes = 2 * math.prod(size) * model.kv_dtype.itemsize
        num_layers = min(-(-_COLD_BYTES // pool_bytes), Timer.CALLS)

        def pool() -> torch.Tensor:
            # Drawn in place: a float32 copy of the pool might not fit beside it.
            drawn = torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_()
            return drawn.to(model.kv_dtype)

        self._layers = [LayerKv(pool(), pool()) for _ in range(num_layers)]
        self._next = 0
        self.query = torch.randn(
            num_tokens, model.num_heads, model.head_dim, device="cuda", dtype=torch.bfloat16
        )
        self.layer = AttentionLayer(model.head_dim**-0.5)
        setup = AttentionSetup(
            shape=kv_shape,
            num_heads=model.num_heads,
            kv_dtype=model.kv_dtype,
            windows=(None,),
            max_num_seqs=load.num_reqs,
            max_num_batched_tokens=num_tokens,
            max_model_len=load.seq_len,
        )
        # Kept: graphs read its buffers.
        self.backend = TritonAttention(setup, target, torch.device("cuda"))
        self.step = self.backend.prepare(self.shape)

    def attend(self) -> torch.Tensor:
        """Attention of the next layer."""
        kv = self._layers[self._next]
        self._next = (self._next + 1) % len(self._layers)
        return self.step.attend(self.query, kv, self.layer)

    def error(self) -> float:
        """Largest difference from the reference."""
        expected = ReferenceAttention().prepare(self.shape).attend(self.query, self.kv, self.layer)
        return float((self.attend().float() - expected.float()).abs().max())


def _attention_tables(model: Model, target: Target, timer: Timer, peaks: Peaks) -> None:
    for load in (Load(3, 1, 700), Load(2, 5, 700), Load(2, 150, 300)):
        error = AttentionRun(model, target, load).error()
        if not error <= _TOLERANCE:
            raise SystemExit(f"{model.name}: {load} is wrong by {error}: nothing is timed")
    token_bytes = 2 * model.num_kv_heads * model.head_dim * model.kv_dtype.itemsize

    def decode_share(load: Load, seconds: float) -> float:
        return load.num_reqs * load.seq_len * token_bytes / seconds / peaks.copy

    def chunk_share(load: Load, seconds: float) -> float:
        seen = load.num_queries * (2 * load.seq_len - load.num_queries + 1) // 2
        return 4 * load.num_reqs * seen * model.num_heads * model.head_dim / seconds / peaks.matrix

    kinds = (
        ("decode, share of copy bandwidth", DECODES, decode_share),
        ("verify, share of copy bandwidth", VERIFIES, decode_share),
        ("prefill, share of matrix peak", CHUNKS, chunk_share),
    )
    for title, loads, share in kinds:
        rows = []
        for load in loads:
            if load.num_reqs * load.seq_len * token_bytes > torch.cuda.mem_get_info()[0] // 4:
                rows.append((*_load_cells(load), "", "does not fit"))
                continue
            seconds = timer.seconds(AttentionRun(model, target, load).attend)
            rows.append((*_load_cells(load), f"{seconds * 1e6:.1f}", f"{share(load, seconds):.1%}"))
        _print_table(
            f"{model.name}: {title}", ("requests", "queries", "context", "us", "share"), rows
        )


def _load_cells(load: Load) -> tuple[str, str, str]:
    return str(load.num_reqs), str(load.num_queries), str(load.seq_len)


def _op_table(timer: Timer, peaks: Peaks) -> None:
    """Other kernels by the bytes that they must move."""
    ops, rows = TritonOps(), []
    for num_tokens in (1, 256, 4096):
        for name, (call, num_bytes) in _layer_calls(ops, num_tokens).items():
            seconds = timer.seconds(call)
            share = num_bytes / seconds / peaks.copy
            rows.append((name, str(num_tokens), f"{seconds * 1e6:.1f}", f"{share:.1%}"))
    for num_samples in (1, 64, 256):
        for name, call in _sample_calls(ops, num_samples).items():
            seconds = timer.seconds(call)
            share = num_samples * 128256 * 4 / seconds / peaks.copy
            rows.append((name, str(num_samples), f"{seconds * 1e6:.1f}", f"{share:.1%}"))
    _print_table(
        "other kernels, share of copy bandwidth (few rows stay in the cache)",
        ("kernel", "rows", "us", "share"),
        rows,
    )


def _layer_calls(ops: TritonOps, num_tokens: int) -> dict[str, tuple[Callable[[], object], int]]:
    """By name: a call, and the bytes that it must read and write."""

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", dtype=torch.bfloat16)

    hidden, update = random(num_tokens, 4096), random(num_tokens, 4096)
    weight = torch.ones(4096, device="cuda")
    gate_up, qkv = random(num_tokens, 28672), random(num_tokens, 48, 128)
    pool = random(-(-num_tokens // _PAGE), 8, _PAGE, 128)
    kv = LayerKv(pool, pool.clone())
    index = torch.arange(num_tokens, device="cuda")
    places = TokenPlaces(index, index.int())
    norms = HeadNorms(random(128), random(128), 1e-6)
    angles = torch.rand(num_tokens, 64, device="cuda")
    rope = RopeTables(angles.cos(), angles.sin())
    return {
        "add_rms_norm": (
            lambda: ops.add_rms_norm(hidden, update, weight, 1e-5),
            4 * hidden.nbytes,
        ),
        "silu gate": (lambda: ops.gate(gate_up, "silu"), gate_up.nbytes * 3 // 2),
        "rotate_and_write": (
            lambda: ops.rotate_and_write(qkv, kv, places, norms, rope),
            2 * qkv.nbytes,
        ),
    }


def _sample_calls(ops: TritonOps, num_samples: int) -> dict[str, Callable[[], object]]:
    logits = 3 * torch.randn(num_samples, 128256, device="cuda")

    def call(top_k: int, top_p: float) -> Callable[[], object]:
        def full(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((num_samples,), value, dtype=dtype, device="cuda")

        draws = Draws(
            seeds=torch.arange(num_samples, device="cuda"),
            positions=full(3, torch.int64),
            top_k=full(top_k, torch.int32),
            top_p=full(top_p, torch.float64),
            min_p=full(0, torch.float64),
            is_drawn=full(1, torch.int32),
        )
        return lambda: ops.sample(logits, draws)

    return {
        "sample": call(0, 1.0),
        "sample top_k 50": call(50, 1.0),
        "sample top_p 0.9": call(0, 0.9),
    }


def _print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print(title)
    for row in (head, *rows):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
