"""`python -m tests.chaos.stub_worker`: the gpuworker's own service and rows, with the stub model.

Starts in well under a second: torch is never imported. What the service takes from modules that
need torch are three names, which stand-ins provide.
"""

import sys
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from gpuworker.core.input_batch import BatchLimits, FlatBatch, InputBatch
from gpuworker.core.plan import ExecutedStep, LogprobColumns, ReceivedPlan, RowLogprobColumns
from headrace.service.process import ProcessConfig, run, write_address
from headrace.service.serving import GrpcServer, ServingConfig, stop_asked
from headrace.vocabulary import WorkerRole
from tests.chaos import stub_model

_CLOSE_STREAMS_S = 1.0


class Pending:
    """A launched step; the device is done with it after step_s."""

    def __init__(self, done_s: float, complete: Callable[[], ExecutedStep]) -> None:
        self._done_s = done_s
        self._complete = complete
        self._result: ExecutedStep | None = None

    @property
    def is_done(self) -> bool:
        return time.monotonic() >= self._done_s

    def wait(self) -> None:
        time.sleep(max(0.0, self._done_s - time.monotonic()))

    def finish(self) -> ExecutedStep:
        if self._result is None:
            self._result = self._complete()
        return self._result


class StubRunner:
    """What `gpuworker.runner.ModelRunner` is to the service, over the same rows."""

    num_spec_tokens = 0

    def __init__(self, limits: BatchLimits, step_s: float, counts: "Counts") -> None:
        self.limits = limits
        self._rows = InputBatch(limits)
        self._kv = np.zeros(limits.num_kv_blocks * limits.block_size, dtype=np.uint64)
        self._last_ids = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._placed: dict[int, int] = {}  # tokens that had been computed before, by row
        self._pending: deque[Pending] = deque()
        self._step_s = step_s
        self._counts = counts

    @property
    def num_requests(self) -> int:
        return int(self._rows.slots.is_occupied.sum())

    def reset(self) -> None:
        self._pending.clear()
        self._rows.clear()

    def launch(self, plan: ReceivedPlan) -> Pending:
        while len(self._pending) > 1:
            self._pending.popleft().finish()
        batch = self._rows.apply(plan)
        audit = self._rows.occupied_rows() if plan.wants_audit else None
        self._count(plan)
        self._counts.placed([request.request_id for request in plan.row_requests])
        sampled = self._run(batch)
        opened = self._rows.open(batch)
        # Now: by the time the step completes, its rows may have other requests.
        logprobs = self._logprobs(batch, sampled)
        done_s = time.monotonic() + (self._step_s if batch.num_tokens else 0.0)

        def complete() -> ExecutedStep:
            while self._pending and self._pending[0] is not step and step in self._pending:
                self._pending.popleft().finish()
            if step in self._pending:
                self._pending.remove(step)
            self._rows.settle(opened, sampled)
            return ExecutedStep(
                step_id=plan.step_id,
                num_sampled_tokens=batch.num_samples,
                token_ids=sampled,
                logprobs=logprobs,
                elapsed_s=self._step_s,
                audit=audit,
            )

        step = Pending(done_s, complete)
        self._pending.append(step)
        return step

    def _run(self, batch: FlatBatch) -> Any:
        """Writes the KV of the step's tokens and samples."""
        open_rows = ~np.minimum(batch.token_ids, -1)  # of tokens that are not known on the host
        ids = np.where(batch.token_ids < 0, self._last_ids[open_rows], batch.token_ids)
        with np.errstate(over="ignore"):
            self._kv[batch.slot_mapping] = stub_model.key_values(ids, batch.positions)
            samples = np.flatnonzero(batch.num_samples)
            rows = batch.rows[samples]
            slots, is_there = self._slots(batch, samples)
            contexts = (self._kv[slots] * is_there).sum(axis=1, dtype=np.uint64)
            seeds = np.where(self._rows.slots.is_drawn[rows], self._rows.slots.seed[rows], 0)
            sampled = stub_model.next_tokens(
                contexts, ids[batch.logits_indices], seeds.astype(np.uint64), batch.sample_positions
            )
        self._last_ids[rows] = sampled
        return sampled

    def _slots(self, batch: FlatBatch, samples: Any) -> tuple[Any, Any]:
        """Slots of all tokens of the requests that sample, and which of the slots count."""
        block_size = self.limits.block_size
        offsets = np.arange(batch.block_table.shape[1] * block_size)
        blocks = batch.block_table[samples][:, offsets // block_size].astype(np.int64)
        is_there = offsets < batch.seq_lens[samples][:, None]
        return blocks * block_size + offsets % block_size, is_there.astype(np.uint64)

    def _logprobs(self, batch: FlatBatch, sampled: Any) -> tuple[RowLogprobColumns, ...]:
        slots, found = self._rows.slots, []
        starts = np.cumsum(batch.num_samples) - batch.num_samples
        for i, row in enumerate(batch.rows.tolist()):
            of_tokens = of_prompt = None
            if slots.num_logprobs[row] >= 0 and batch.num_samples[i]:
                token_ids = sampled[starts[i] : starts[i] + batch.num_samples[i]]
                of_tokens = _columns(token_ids, int(slots.num_logprobs[row]))
            if (mine := batch.prompt_rows == row).any():
                targets = batch.prompt_target_ids[mine]
                of_prompt = _columns(targets, int(slots.num_prompt_logprobs[row]))
            if of_tokens is not None or of_prompt is not None:
                found.append(RowLogprobColumns(row, of_tokens, of_prompt))
        return tuple(found)

    def _count(self, plan: ReceivedPlan) -> None:
        """Counts tokens that are computed again, of requests that had generated tokens."""
        for request in plan.row_requests:
            if len(request.token_ids) > request.num_prompt_tokens:
                self._placed[request.row] = len(request.token_ids) - 1
        if not self._placed:
            return
        for row, computed in zip(
            plan.rows.tolist(), plan.num_computed_tokens.tolist(), strict=True
        ):
            if (before := self._placed.pop(row, None)) is not None:
                self._counts.add(max(0, before - computed))


def _columns(token_ids: Any, num_top: int) -> LogprobColumns:
    return LogprobColumns(token_ids.astype(np.int32), *_in_order(token_ids, num_top))


def _in_order(token_ids: Any, num_top: int) -> tuple[Any, ...]:
    values, ranks, top_ids, top_logprobs = stub_model.logprobs(token_ids, num_top)
    return values, ranks.astype(np.int32), top_ids, top_logprobs


class Counts:
    """What SIGKILL does not lose: recomputed tokens, in a mapped file, and the placed requests."""

    def __init__(self, file: str) -> None:
        self._placed = Path(f"{file}.placed").open("ab", buffering=0)  # noqa: SIM115 for good
        if not Path(file).exists():
            np.zeros(1, dtype=np.int64).tofile(file)
        self._mapped = np.memmap(file, dtype=np.int64, mode="r+")

    def add(self, num_tokens: int) -> None:
        self._mapped[0] += num_tokens

    def placed(self, request_ids: Sequence[str]) -> None:
        """Notes requests that got a row, one a line."""
        if request_ids:
            self._placed.write("".join(f"{request_id}\n" for request_id in request_ids).encode())


@dataclass(frozen=True, slots=True)
class StubLoaded:
    """What the service reads of a loaded model."""

    runner: StubRunner
    pipeline_depth: int
    device: str = "none"
    dtype: str = "none"
    kv_dtype: str = "none"
    driver: str = ""
    device_memory_bytes: int = 0


def _without_torch() -> None:
    """Stands in for the modules that need torch, in this process alone."""
    for name, attribute in (
        ("torch", "AcceleratorError"),
        ("gpuworker.engine", "LoadedModel"),
        ("gpuworker.runner", "PendingStep"),
    ):
        module = types.ModuleType(name)
        setattr(module, attribute, type(attribute, (RuntimeError,), {}))
        sys.modules[name] = module


async def serve(
    worker_id: str, loaded: StubLoaded, serving: ServingConfig, process: ProcessConfig
) -> None:
    from gpuworker.rpc.service import FULL_NAME, GpuWorkerService, WorkerIdentity

    identity = WorkerIdentity(worker_id, stub_model.MODEL, WorkerRole("mixed"))
    model_thread = ThreadPoolExecutor(1, thread_name_prefix="model")
    service = GpuWorkerService(identity, model_thread)
    server = GrpcServer(serving, [FULL_NAME])
    service.add_to(server.server)
    stop = stop_asked()
    write_address(process, await server.start())
    service.set_engine(loaded)  # type: ignore[arg-type]
    server.set_serving(True)
    await stop.wait()
    server.set_serving(False)
    await service.drain(serving.drain_timeout_s)
    service.close_stream()
    await server.stop(_CLOSE_STREAMS_S)
    model_thread.shutdown(wait=False, cancel_futures=True)


@click.command()
@click.option("--worker-id", required=True)
@click.option("--listen", required=True)
@click.option("--address-file", required=True)
@click.option("--counts-file", required=True, help="Counts that outlive the process.")
@click.option("--step-ms", default=20.0, help="How long a step takes.")
@click.option("--pipeline-depth", default=1)
@click.option("--num-kv-blocks", default=160)
@click.option("--max-num-seqs", default=12)
@click.option("--drain-timeout-s", default=5.0)
def main(
    worker_id: str,
    listen: str,
    address_file: str,
    counts_file: str,
    step_ms: float,
    pipeline_depth: int,
    num_kv_blocks: int,
    max_num_seqs: int,
    drain_timeout_s: float,
) -> None:
    """Answer plans with the tokens of `stub_model`, until SIGTERM."""
    _without_torch()
    limits = BatchLimits(
        max_num_seqs=max_num_seqs,
        max_model_len=2048,
        max_num_batched_tokens=256,
        block_size=8,
        num_kv_blocks=num_kv_blocks + 1,
        vocab_size=stub_model.VOCAB_SIZE,
        eos_token_ids=(stub_model.EOS_TOKEN_ID,),
    )
    loaded = StubLoaded(StubRunner(limits, step_ms / 1000, Counts(counts_file)), pipeline_depth)
    serving = ServingConfig(listen=listen, drain_timeout_s=drain_timeout_s)
    process = ProcessConfig(address_file=address_file)
    run("gpuworker", process, serve(worker_id, loaded, serving, process))


if __name__ == "__main__":
    main()
