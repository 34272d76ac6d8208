"""Tokens per second of whole models, with Headrace's runner and with other engines.

Weights are random and requests equal: a prefill of one prompt, then decodes of a batch whose
contexts begin at the prompt's length. Headrace's runner is driven without a scheduler; `peers` runs
the other engines.
"""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_machine import Machine
from benchmarks.random_model import RandomSource
from benchmarks.tables import Table
from gpuworker.config import KvCacheSettings, WorkerSettings
from gpuworker.core.plan import AssignedRequest, Int32Array, ReceivedPlan, SamplingSettings
from gpuworker.engine import load_engine
from gpuworker.kv_pool import KvPoolError
from gpuworker.runner import ModelRunner, PendingStep

_PEERS = ("vllm", "transformers")
_NOT_INSTALLED = 3
_PEER_TIMEOUT_S = 1200.0
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second; decodes by number of requests, where the pool holds that many."""

    prefill: float
    decode: dict[int, float]


@dataclass(frozen=True, slots=True)
class Task:
    """The task for an engine; hf is the model's config.json."""

    name: str
    hf: dict[str, Any]
    num_prompt_tokens: int
    num_decodes: int
    batches: tuple[int, ...]
    device: str
    dtype: str


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
LLAMA_8B = LLAMA | {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
SMALL = LLAMA | {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
TINY = LLAMA | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": True,
}


def tasks(machine: Machine) -> list[Task]:
    """The models and loads to measure."""
    dtype = str(machine.dtype).removeprefix("torch.")
    if machine.is_dry:
        return [Task("tiny", TINY, 20, 2, (1, 3), machine.device.type, dtype)]
    return [
        Task(name, hf, 512, 64, (1, 64, 256), machine.device.type, dtype)
        for name, hf in (("llama 8b", LLAMA_8B), ("smollm2 135m", SMALL))
    ]


def model_table(task: Task) -> Table:
    """Headrace beside the other installed engines."""
    table = Table(
        f"{task.name}, {task.dtype}, random weights: tokens/s, prompts of {task.num_prompt_tokens}",
        ("engine", "prefill", *(f"decode of {n}" for n in task.batches)),
    )
    for name, speeds in [("headrace", _ours_or_why(task)), *((n, peer(task, n)) for n in _PEERS)]:
        if isinstance(speeds, str):
            table.rows.append((name, speeds, *("" for _ in task.batches)))
        else:
            table.rows.append(
                (
                    name,
                    speeds.prefill,
                    *(speeds.decode.get(n, "does not fit") for n in task.batches),
                )
            )
    return table


def _ours_or_why(task: Task) -> Speeds | str:
    try:
        return ours(task)
    except (KvPoolError, torch.OutOfMemoryError) as error:
        return f"does not fit: {error}"
    finally:
        # Free the memory for the next engine, which runs in another process.
        gc.collect()
        if task.device == "cuda":
            torch.cuda.empty_cache()


def ours(task: Task) -> Speeds:
    """Measures Headrace's runner, with a worker's default settings."""
    device = torch.device(task.device)
    source = RandomSource(task.hf, device, getattr(torch, task.dtype))
    length = task.num_prompt_tokens + task.num_decodes + 1
    settings = WorkerSettings(
        device="cuda" if device.type == "cuda" else "cpu",
        dtype=task.dtype,
        max_model_len=length,
        max_num_seqs=max(task.batches),
    )
    kv_cache = KvCacheSettings(block_size=BLOCK_SIZE)

    def ignore(_done: int, _all: int) -> None:
        """Progress is not shown."""

    engine = load_engine(settings, kv_cache, source, loading=ignore, capturing=ignore)
    runner = engine.runner
    # The first requests of a size are a warm-up: kernels and buffers are created once.
    Requests(runner, task, 1).prefill()
    prefill = statistics.median(Requests(runner, task, 1).prefill() for _ in range(3))
    decode = {}
    for num_reqs in task.batches:
        if num_reqs * blocks_of(task) >= runner.limits.num_kv_blocks:
            continue
        requests = Requests(runner, task, num_reqs)
        requests.prefill()
        decode[num_reqs] = requests.decode(engine.pipeline_depth)
    return Speeds(prefill, decode)


def blocks_of(task: Task) -> int:
    """KV blocks of one request at its maximum length."""
    return -(-(task.num_prompt_tokens + task.num_decodes) // BLOCK_SIZE)


class Requests:
    """Equal requests in the first rows of a runner that has no other requests."""

    def __init__(self, runner: ModelRunner, task: Task, num_reqs: int) -> None:
        runner.reset()
        self._runner = runner
        self._task = task
        self._rows = np.arange(num_reqs, dtype=np.int32)
        self._num_steps = 0

    def prefill(self) -> float:
        """Computes every prompt, at the runner's maximum tokens per step: tokens per second."""
        limit = self._runner.limits.max_num_batched_tokens
        length = self._task.num_prompt_tokens
        placed = self._placed()
        start = time.perf_counter()
        for row in self._rows:
            for done in range(0, length, limit):
                count = min(limit, length - done)
                self._start(np.array([row], np.int32), done, count, **placed).finish()
                placed = {}
        return len(self._rows) * length / (time.perf_counter() - start)

    def decode(self, pipeline_depth: int) -> float:
        """Decodes one token of every request per step: tokens per second, by the median step.

        pipeline_depth: steps in flight at a time, as with a scheduler.
        """
        ends, pending = [time.perf_counter()], deque[PendingStep]()
        for i in range(self._task.num_decodes):
            pending.append(self._start(self._rows, self._task.num_prompt_tokens + i, 1))
            if len(pending) == pipeline_depth:
                pending.popleft().finish()
                ends.append(time.perf_counter())
        for step in pending:
            step.finish()
        return len(self._rows) / statistics.median(np.diff(ends))

    def _start(self, rows: Int32Array, num_computed: int, count: int, **placed: Any) -> PendingStep:
        every = np.ones_like(rows)
        plan = ReceivedPlan(
            step_id=self._num_steps,
            rows=rows,
            num_computed_tokens=every * num_computed,
            num_scheduled_tokens=every * count,
            **placed,
        )
        self._num_steps += 1
        return self._runner.launch(plan)

    def _placed(self) -> dict[str, Any]:
        """Columns of a plan that assigns a row and all its blocks to each request."""
        length = self._task.num_prompt_tokens
        rng, vocab_size = np.random.default_rng(0), self._runner.limits.vocab_size
        greedy = SamplingSettings(temperature=0.0, ignore_eos=True)
        num_blocks = blocks_of(self._task)
        return {
            "row_requests": tuple(
                AssignedRequest(
                    row, f"r{row}", rng.integers(0, vocab_size, length, np.int32), length, greedy
                )
                for row in self._rows.tolist()
            ),
            "appended_block_rows": np.repeat(self._rows, num_blocks),
            "appended_block_ids": 1 + np.arange(len(self._rows) * num_blocks, dtype=np.int32),
        }


def peer(task: Task, name: str) -> Speeds | str:
    """Speeds of another engine, run in its own process, or the reason for its failure."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.peers", name],
        input=json.dumps(asdict(task)),
        capture_output=True,
        text=True,
        timeout=_PEER_TIMEOUT_S,
        check=False,
    )
    if done.returncode == _NOT_INSTALLED:
        return "not installed"
    if done.returncode:
        return f"failed: {(done.stderr.strip().splitlines() or ['?'])[-1][:80]}"
    # Engines print other lines before the result.
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return Speeds(answer["prefill"], {int(n): speed for n, speed in answer["decode"].items()})
