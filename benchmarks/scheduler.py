"""A step's cost in the scheduling core: schedule + update, without a worker.

Medians over the measured steps of each workload, in microseconds. Prefix caching and explanations
are on. Beside it the cost of one audit of the KV blocks' book, which runs only when asked for.

    python -m benchmarks.scheduler [--steps N] [WORKLOAD ...]
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from scheduler.core.plan import NewRequest, SchedulerConfig, StepPlan, StepResult
from scheduler.core.scheduler import SchedulerCore

BLOCK_SIZE = 16
EOS = 2
NUM_WARM_UP_STEPS = 40
_NUM_AUDITS = 5
STEPS_PER_TURN = 16  # in which every decode crosses a block boundary once


@dataclass(frozen=True)
class Workload:
    """The initial running requests, and the arrivals during the measurement."""

    name: str
    config: SchedulerConfig
    first: tuple[NewRequest, ...]
    arrivals: Callable[[SchedulerCore, int], Iterator[NewRequest]]
    target_us: float | None = None


class Bench:
    """One core and a worker that answers at once."""

    def __init__(self, workload: Workload) -> None:
        self.core = SchedulerCore(workload.config)
        self._arrivals = workload.arrivals
        self._random = np.random.default_rng(0)
        self._num_steps = 0
        for request in workload.first:
            self.core.add_request(request, 0.0)
        for _ in range(NUM_WARM_UP_STEPS):
            self.step()

    def step(self) -> float:
        """Seconds spent in schedule and update; adding the arrivals is not timed."""
        core = self.core
        self._num_steps += 1
        for request in self._arrivals(core, self._num_steps):
            core.add_request(request, 0.0)
        started = time.perf_counter()
        plan = core.schedule(0.0)
        spent = time.perf_counter() - started
        result = self._result(plan)
        started = time.perf_counter()
        core.update(result, 0.0)
        return spent + time.perf_counter() - started

    def audit(self) -> float:
        """Seconds that an audit holds up the next step."""
        started = time.perf_counter()
        audit = self.core.audit()
        self.core.row_tables()
        spent = time.perf_counter() - started
        assert not audit.faults, audit.faults
        return spent

    def _result(self, plan: StepPlan) -> StepResult:
        flights = self.core.state.flights
        sampled = (
            (~flights[0].is_prefill_chunk).astype(np.int32) if flights else np.empty(0, np.int32)
        )
        tokens = self._random.integers(3, 30_000, int(sampled.sum()), dtype=np.int32)
        return StepResult(step_id=plan.step_id, num_sampled_tokens=sampled, token_ids=tokens)


def nothing(_core: SchedulerCore, _number: int) -> Iterator[NewRequest]:
    """No arrivals."""
    return iter(())


def request(key: int, num_prompt_tokens: int, max_tokens: int, seed: int = 0) -> NewRequest:
    """A request; with equal seeds, the shorter prompt is a prefix of the longer."""
    tokens = np.random.default_rng(seed or key + 1).integers(3, 30_000, num_prompt_tokens)
    return NewRequest(
        key=key,
        request_id=f"r{key}",
        prompt_token_ids=tokens.astype(np.int32),
        max_tokens=max_tokens,
        arrival_time=float(key),
        eos_token_ids=(EOS,),
    )


def decodes(count: int, steps: int, target_us: float | None) -> Workload:
    """A steady set, spread evenly over the positions in a block."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=count * (-(-(64 + steps) // BLOCK_SIZE) + 8) + 1,
        max_model_len=32_768,
        max_num_batched_tokens=max(8192, count),
        max_num_seqs=count,
    )
    first = tuple(request(i, 33 + i % BLOCK_SIZE, 1_000_000) for i in range(count))
    return Workload(f"{count} decodes", config, first, nothing, target_us)


def mixed(count: int, chunk: int, steps: int, target_us: float | None) -> Workload:
    """A steady set, and in each step a chunk of some long prompt."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=count * (-(-(64 + steps) // BLOCK_SIZE) + 8) + 40_000,
        max_model_len=32_768,
        max_num_batched_tokens=count + chunk,
        max_num_seqs=count + 2,
    )
    first = tuple(request(i, 33 + i % BLOCK_SIZE, 1_000_000) for i in range(count))

    def arrivals(core: SchedulerCore, number: int) -> Iterator[NewRequest]:
        if core.num_waiting < 2:
            yield request(count + number, 32_000, 1)

    return Workload(f"{count} decodes + {chunk}-token chunk", config, first, arrivals, target_us)


def preemption(count: int) -> Workload:
    """A pool for three quarters of the running requests: most steps preempt a request."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=count * 9,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=count,
    )
    first = tuple(request(i, 60 + i % 80, 128) for i in range(count))

    def arrivals(core: SchedulerCore, number: int) -> Iterator[NewRequest]:
        for i in range(max(count - len(core.state.requests), 0)):
            yield request(10_000 + number * count + i, 60 + i % 80, 128)

    return Workload(f"heavy preemption, {count} requests", config, first, arrivals)


def prefix_reuse(count: int) -> Workload:
    """Requests constantly arrive and finish, all with the same prefix of 2,048 tokens."""
    config = SchedulerConfig(
        block_size=BLOCK_SIZE,
        num_gpu_blocks=count * 20 + 2000,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=count,
    )

    def shared(key: int) -> NewRequest:
        made = request(key, 2048 + 40, 16 + key % 47, seed=99)
        made.prompt_token_ids[2048:] += key
        return made

    def arrivals(core: SchedulerCore, number: int) -> Iterator[NewRequest]:
        for i in range(max(count - len(core.state.requests), 0)):
            yield shared(10_000 + number * count + i)

    first = tuple(shared(i) for i in range(count))
    return Workload(f"heavy prefix reuse, {count} requests", config, first, arrivals)


def workloads(steps: int) -> list[Workload]:
    """All workloads."""
    return [
        decodes(1, steps, 40),
        decodes(16, steps, None),
        decodes(64, steps, None),
        decodes(256, steps, 150),
        decodes(1024, steps, 350),
        decodes(4096, steps, None),
        mixed(256, 512, steps, 250),
        preemption(256),
        prefix_reuse(256),
    ]


def medians_us(benches: Sequence[Bench], steps: int) -> list[float]:
    """Median cost of a step per workload, measured in turns so that machine load is shared."""
    spent: list[list[float]] = [[] for _ in benches]
    gc.collect()
    for _ in range(-(-steps // STEPS_PER_TURN)):
        for bench, seconds in zip(benches, spent, strict=True):
            seconds += [bench.step() for _ in range(STEPS_PER_TURN)]
    return [statistics.median(seconds) * 1e6 for seconds in spent]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("names", nargs="*", help="only workloads whose name contains one of these")
    options = parser.parse_args()
    print(f"{'microseconds, median':40}{'step':>10}{'target':>9}{'audit':>9}{'blocks':>9}")
    for workload in workloads(options.steps):
        if options.names and not any(name in workload.name for name in options.names):
            continue
        bench = Bench(workload)
        (measured,) = medians_us([bench], options.steps)
        audit = statistics.median(bench.audit() for _ in range(_NUM_AUDITS)) * 1e6
        target = "" if workload.target_us is None else f"{workload.target_us:.0f}"
        num_blocks = workload.config.num_gpu_blocks
        print(f"{workload.name:40}{measured:10.0f}{target:>9}{audit:9.0f}{num_blocks:9}")


if __name__ == "__main__":
    main()
