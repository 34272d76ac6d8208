"""A step's cost on the worker's host: Python from a plan's message to its launch, and attention.

    python -m benchmarks.host_time [--num-seqs 256] [--steps 2000] [--json FILE]

Rows, work lists of attention, packing and the sampler's bookkeeping are real; the model is an empty
graph, and the kernels do nothing. So the benchmark runs without a GPU. A GPU adds about a dozen
launches after the graph's, while the device is working.

parse is the time from the message to columns, prepare from the columns to the graph's replay; the
device would wait for their sum. rest is `launch` after the replay, finish reads the tokens.

Attention is measured for a worker on the CPU, one layer of SmolLM2-135M on one thread: with the
compiled kernel, which a worker uses if a compiler is installed, and with torch.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from gpuworker.attention.cpu import TorchAttention
from gpuworker.attention.interface import (
    AttentionBackend,
    AttentionLayer,
    KvShape,
    LayerKv,
    StepShape,
)
from gpuworker.attention.native import NativeAttention
from gpuworker.attention.native_library import NativeUnavailableError
from gpuworker.attention.triton.backend import AttentionSetup, TritonAttention
from gpuworker.attention.triton.configs import Target
from gpuworker.core.input_batch import BatchLimits
from gpuworker.core.plan import ExecutedStep, ReceivedPlan
from gpuworker.device.graphs import default_sizes
from gpuworker.device.transfers import HostTransfers
from gpuworker.forward import Forward
from gpuworker.rpc import wire
from gpuworker.runner import ModelRunner
from gpuworker.sampling.sampler import Sampler
from gpuworker.step_inputs import InputStaging
from headrace.service.columns import pack_int32
from headrace.v1 import common_pb2, gpuworker_pb2

GOAL_US = 150
CPU = torch.device("cpu")
BLOCK_SIZE = 64
# Tensors are as small as possible, because their arithmetic would run on the device.
VOCAB_SIZE = 64
# The GPU that work lists are split for.
GPU = Target("sm90", 132)
_PARTS = ("parse", "prepare", "parse + prepare", "rest", "finish", "all")


class StubModel:
    """A stub for decoder, graph recorder and graphs: notes the time of each replay."""

    def __init__(self) -> None:
        self.device = CPU
        self.config = type("Config", (), {"vocab_size": VOCAB_SIZE})
        self.replayed_s = 0.0

    def forward(self, token_ids: torch.Tensor, *_: Any) -> torch.Tensor:
        return torch.zeros(len(token_ids), 1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(hidden), VOCAB_SIZE)

    def record(self, run: Callable[[], None]) -> "StubModel":
        run()
        return self

    def replay(self) -> None:
        self.replayed_s = time.perf_counter()


class StubOps:
    """Kernels that do nothing and always sample token 1."""

    def __init__(self, max_num_samples: int) -> None:
        self._tokens = torch.ones(max_num_samples, dtype=torch.int32)

    def edit_logits(self, *_: Any) -> None:
        return

    def adjust_logits(self, *_: Any) -> None:
        return

    def sample(self, scaled: torch.Tensor, _draws: Any) -> torch.Tensor:
        return self._tokens[: len(scaled)]


def make_runner(num_seqs: int, model: StubModel) -> ModelRunner:
    """A worker's runner over the stub."""
    limits = BatchLimits(
        max_num_seqs=num_seqs,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_seqs * 8192 // BLOCK_SIZE + 1,
        vocab_size=VOCAB_SIZE,
    )
    setup = AttentionSetup(
        shape=KvShape(limits.num_kv_blocks, BLOCK_SIZE, 8, 128),
        num_heads=32,
        kv_dtype=torch.bfloat16,
        windows=(None,),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
    )
    transfers = HostTransfers()
    ops: Any = StubOps(limits.max_num_batched_tokens)
    decoder: Any = model
    sampler = Sampler(ops, limits, CPU, transfers)
    forward = Forward(
        decoder,
        TritonAttention(setup, GPU, CPU),
        (),
        InputStaging(limits, CPU),
        sampler.last_tokens,
    )
    recorder: Any = model
    forward.capture(default_sizes(num_seqs), recorder, lambda _done, _of: None)
    return ModelRunner(forward, sampler, transfers, limits, clock=time.perf_counter)


def messages(num_seqs: int, num_steps: int) -> Iterator[gpuworker_pb2.StepPlan]:
    """Plans: prompts, one per step, then decodes of all rows; each block boundary adds a block."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(500, 1500, num_seqs).astype(np.int32)
    free = iter(range(1, 1 << 30))
    held = np.zeros(num_seqs, dtype=np.int32)
    one = np.ones(num_seqs, dtype=np.int32)
    for row, length in enumerate(lengths.tolist()):
        held[row] = -(-length // BLOCK_SIZE)
        sampling = common_pb2.SamplingParams(temperature=0.8, top_p=0.95, seed=row)
        yield gpuworker_pb2.StepPlan(
            step_id=row,
            row_requests=[
                gpuworker_pb2.RowRequest(
                    row=row,
                    token_ids=pack_int32(np.ones(length, dtype=np.int32)),
                    num_prompt_tokens=length,
                    sampling=sampling,
                )
            ],
            appended_block_rows=pack_int32(np.full(held[row], row, dtype=np.int32)),
            appended_block_ids=pack_int32(_taken(free, held[row])),
            rows=pack_int32(np.array([row], dtype=np.int32)),
            # The stub runs no prefill: all tokens but the last count as computed.
            num_computed_tokens=pack_int32(np.array([length - 1], dtype=np.int32)),
            num_scheduled_tokens=pack_int32(one[:1]),
        )
    rows = np.arange(num_seqs, dtype=np.int32)
    for step in range(num_steps):
        computed = lengths + step
        grown = np.flatnonzero(computed + 1 > held * BLOCK_SIZE).astype(np.int32)
        held[grown] += 1
        yield gpuworker_pb2.StepPlan(
            step_id=num_seqs + step,
            appended_block_rows=pack_int32(grown),
            appended_block_ids=pack_int32(_taken(free, len(grown))),
            rows=pack_int32(rows),
            num_computed_tokens=pack_int32(computed),
            num_scheduled_tokens=pack_int32(one),
        )


def _taken(free: Iterator[int], count: int) -> np.ndarray:
    return np.array([next(free) for _ in range(count)], dtype=np.int32)


def measure(num_seqs: int, num_steps: int) -> dict[str, np.ndarray]:
    """Microseconds of each step's parts; one step is launched ahead, as on a GPU worker."""
    model = StubModel()
    runner = make_runner(num_seqs, model)
    clock = time.perf_counter
    times: list[tuple[float, ...]] = []
    pending = None
    for message in messages(num_seqs, num_steps):
        received = clock()
        plan: ReceivedPlan = wire.step_plan(message)
        parsed = clock()
        step = runner.launch(plan)
        launched = clock()
        if pending is not None:
            result: ExecutedStep = pending.finish()
            assert not result.errors
        finished = clock()
        pending = step
        parts = (parsed - received, model.replayed_s - parsed, launched - model.replayed_s)
        times.append((*parts, finished - launched))
    # The first decodes are a warm-up: they fill caches that later decodes use.
    table = np.array(times[num_seqs + num_steps // 10 :]).T * 1e6
    parse, prepare, rest, finish = table
    columns = (parse, prepare, parse + prepare, rest, finish, table.sum(0))
    return dict(zip(_PARTS, columns, strict=True))


# Query tokens and context of each request.
_ATTENTION_STEPS = {
    "prefill of 512 at 0": ((512, 512),),
    "prefill of 512 at 1536": ((512, 2048),),
    "16 decodes at 500": ((1, 500),) * 16,
    "4 prefills of 64, 16 decodes at 500": ((64, 500),) * 4 + ((1, 500),) * 16,
}


def measure_attention(requests: Sequence[tuple[int, int]]) -> dict[str, float]:
    """CPU milliseconds of one layer, minimum of several runs: compiled kernel and torch."""
    num_heads, dtype = 9, torch.float32
    queries, seq_lens = (np.array(column, dtype=np.int32) for column in zip(*requests, strict=True))
    num_blocks = -(-seq_lens // 16)
    shape = KvShape(int(num_blocks.sum()) + 1, 16, 3, 64)
    table = np.zeros((len(requests), num_blocks.max()), dtype=np.int32)
    table[np.arange(table.shape[1]) < num_blocks[:, None]] = np.arange(1, shape.num_blocks)
    num_tokens = int(queries.sum())
    step = StepShape(
        query_start_loc=np.concatenate(([0], np.cumsum(queries))).astype(np.int32),
        seq_lens=seq_lens,
        # No key or value is written.
        slot_mapping=np.zeros(num_tokens, dtype=np.int64),
        block_table=table,
        num_padded_tokens=num_tokens,
    )
    kv = LayerKv(*(torch.randn(shape.num_blocks, 3, 16, 64) for _ in range(2)))
    query, layer = torch.randn(num_tokens, num_heads, 64), AttentionLayer(0.125)
    backends: dict[str, AttentionBackend] = {"torch": TorchAttention(shape, num_heads, CPU)}
    with contextlib.suppress(NativeUnavailableError):
        backends["compiled"] = NativeAttention(shape, num_heads, dtype, dtype)
    times = {}
    for name, backend in backends.items():
        spent = []
        for _ in range(8):
            started = time.process_time()
            backend.prepare(step).attend(query, kv, layer)
            spent.append(time.process_time() - started)
        times[name] = min(spent) * 1e3
    return times


@click.command()
@click.option("--num-seqs", default=256, help="Decodes in a step.", show_default=True)
@click.option("--steps", default=2000, help="How many are measured.", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write figures there.")
def main(num_seqs: int, steps: int, json_file: Path | None) -> None:
    """Measure the worker's host time per step."""
    torch.set_num_threads(1)
    figures = {}
    print(f"{num_seqs} decodes, microseconds{'p50':>18}{'p90':>8}{'p99':>8}")
    for name, values in measure(num_seqs, steps).items():
        figures[name] = dict(
            zip(("p50", "p90", "p99"), np.percentile(values, (50, 90, 99)).tolist(), strict=True)
        )
        print(f"  {name:<30}" + "".join(f"{value:>8.0f}" for value in figures[name].values()))
    print(f"  goal of parse + prepare: {GOAL_US}")
    attention = {name: measure_attention(step) for name, step in _ATTENTION_STEPS.items()}
    print(f"attention on the CPU, milliseconds a layer{'compiled':>12}{'torch':>8}")
    for name, times in attention.items():
        print(f"  {name:<40}{times.get('compiled', math.nan):>12.2f}{times['torch']:>8.2f}")
    if json_file is not None:
        content = {"num_seqs": num_seqs, "us": figures, "attention_ms": attention}
        json_file.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    main()
