"""How large the KV pool may be on a GPU: the largest possible step is run to measure its memory.

The KV pool gets what other processes, weights, that step and CUDA graphs leave.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gpuworker.core.input_batch import BatchLimits
from gpuworker.core.plan import AssignedRequest, ReceivedPlan, SamplingSettings
from gpuworker.device.graphs import GraphRecorder
from gpuworker.device.memory import MemoryReader
from gpuworker.kv_pool import KvPoolError
from gpuworker.runner import ModelRunner

# Blocks of the pool used for measuring: the null block and one block that all rows share.
NUM_PROFILE_BLOCKS = 2
# Settings that use every part of the sampler: each takes memory, or a kernel that would otherwise
# be compiled while requests wait.
_COSTLY = SamplingSettings(
    temperature=1.0,
    top_p=0.9,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    num_logprobs=0,
)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """How a device's memory is divided; utilization is the share of the total that may be used."""

    total: int
    utilization: float
    others: int
    weights: int
    step: int
    graphs: int

    @property
    def kv_pool(self) -> int:
        """Bytes left for keys and values; negative when memory is missing."""
        used = self.others + self.weights + self.step + self.graphs
        return int(self.total * self.utilization) - used

    def checked(self) -> "MemoryBudget":
        """Returns this budget.

        Raises:
            KvPoolError: nothing is left for keys and values.
        """
        if self.kv_pool > 0:
            return self
        raise KvPoolError(
            f"no memory is left for keys and values:\n{self}\nLower max-num-batched-tokens (the "
            "step) or max-num-seqs (step and graphs), give fewer cuda-graph-sizes or "
            "enforce-eager, raise gpu-memory-utilization, or stop what else uses this GPU"
        )

    def __str__(self) -> str:
        """As a table."""
        lines = (
            (f"{self.utilization:.0%} of the device", self.total * self.utilization),
            ("- other processes and the driver", self.others),
            ("- weights and buffers", self.weights),
            ("- the largest step", self.step),
            ("- CUDA graphs", self.graphs),
            ("= KV pool", self.kv_pool),
        )
        return "\n".join(f"{name:<34}{size / _GIB:>9.2f} GiB" for name, size in lines)


def measure(
    make_runner: Callable[[], ModelRunner],
    memory: MemoryReader,
    utilization: float,
    graph_sizes: Sequence[int],
    make_recorder: Callable[[], GraphRecorder] | None,
) -> MemoryBudget:
    """Measures the memory of the largest step and of two captured graphs.

    Args:
        make_runner: a runner with a pool of NUM_PROFILE_BLOCKS blocks; the weights are loaded.
        memory: of the runner's device.
        utilization: share of the device's memory that may be used, by all processes together.
        graph_sizes: sizes that will be captured, in rising order.
        make_recorder: makes the recorder of graphs; None without graphs.

    Raises:
        KvPoolError: nothing is left.
    """
    runner = make_runner()
    memory.reset()
    before = memory.read()
    runner.execute(largest_step(runner.limits))
    runner.reset()
    after = memory.read()
    graphs = 0
    if make_recorder is not None:
        graphs = _graph_bytes(runner, memory, graph_sizes, make_recorder())
    del runner
    memory.reset()
    return MemoryBudget(
        total=after.total,
        utilization=utilization,
        others=after.others,
        weights=before.allocated,
        step=after.peak - before.allocated,
        graphs=graphs,
    ).checked()


def largest_step(limits: BatchLimits) -> ReceivedPlan:
    """A step with the most tokens and samples that the limits allow; all rows share block 1."""
    num_reqs = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    rows = np.arange(num_reqs, dtype=np.int32)
    lengths = np.full(num_reqs, limits.max_num_batched_tokens // num_reqs, dtype=np.int32)
    lengths[: limits.max_num_batched_tokens % num_reqs] += 1
    lengths = np.minimum(lengths, limits.max_model_len)
    num_blocks = -(-lengths // limits.block_size)
    return ReceivedPlan(
        step_id=0,
        row_requests=tuple(
            AssignedRequest(row, "profile", np.zeros(length, dtype=np.int32), length, _COSTLY)
            for row, length in enumerate(lengths.tolist())
        ),
        appended_block_rows=np.repeat(rows, num_blocks),
        appended_block_ids=np.ones(int(num_blocks.sum()), dtype=np.int32),
        rows=rows,
        num_computed_tokens=np.zeros(num_reqs, dtype=np.int32),
        num_scheduled_tokens=lengths,
    )


def _graph_bytes(
    runner: ModelRunner, memory: MemoryReader, sizes: Sequence[int], recorder: GraphRecorder
) -> int:
    """Memory of all graphs, extrapolated from the two largest.

    The largest graph allocates the memory that all graphs share; every further graph takes less.
    """
    taken = []
    for size in sizes[-1:-3:-1]:
        memory.reset()
        free = memory.read().free
        runner.forward.capture([size], recorder, lambda _done, _of: None)
        taken.append(max(free - memory.read().free, 0))
    return sum(taken[:1]) + sum(taken[1:]) * (len(sizes) - 1)
