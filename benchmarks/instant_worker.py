"""`python -m benchmarks.instant_worker`: a gpuworker that answers at once and runs no model.

Each sampled token id is the time of sampling, in units of 10 microseconds, so that a client can
compute the token's age. With --step-ms every step takes that long, as a real step would; several
workers in this process then answer at different offsets within the step time.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from headrace.service import terms
from headrace.service.columns import pack_int32, unpack_int32
from headrace.service.process import ProcessConfig, run, write_address
from headrace.service.serving import GrpcServer, ServingConfig, stop_asked
from headrace.v1 import common_pb2, gpuworker_pb2, gpuworker_pb2_grpc

MODEL = "instant"
STAMPS_PER_S = 100_000
# The largest vocabulary a scheduler accepts; token ids are time stamps that wrap after 168 s.
VOCAB_SIZE = 2**24
MAX_NUM_SEQS = 1024


def stamp() -> int:
    """The current time as a token id."""
    return int(time.time() * STAMPS_PER_S) % VOCAB_SIZE


def age_s(token_id: int) -> float:
    """The time since a token was sampled."""
    return (stamp() - token_id) % VOCAB_SIZE / STAMPS_PER_S


class Rows:
    """The number of tokens of each row, which tells the rows with a complete prompt."""

    def __init__(self) -> None:
        self._num_tokens: NDArray[np.int64] = np.zeros(MAX_NUM_SEQS, np.int64)

    def step(self, plan: gpuworker_pb2.StepPlan) -> gpuworker_pb2.StepResult:
        """Samples a token for each row whose tokens are all computed."""
        for request in plan.row_requests:
            self._num_tokens[request.row] = len(request.token_ids) // 4
        rows = unpack_int32(plan.rows, "rows")
        ends = unpack_int32(plan.num_computed_tokens, "num_computed_tokens") + unpack_int32(
            plan.num_scheduled_tokens, "num_scheduled_tokens"
        )
        is_complete = (ends == self._num_tokens[rows]).astype(np.int32)
        self._num_tokens[rows] += is_complete
        token_ids = np.full(int(is_complete.sum()), stamp(), np.int32)
        return gpuworker_pb2.StepResult(
            step_id=plan.step_id,
            num_sampled_tokens=pack_int32(is_complete),
            token_ids=pack_int32(token_ids),
        )


class InstantWorker(gpuworker_pb2_grpc.GpuWorkerServicer):
    """Implements headrace.v1.GpuWorker."""

    def __init__(
        self, worker_id: str, num_kv_blocks: int, *, step_s: float, offset_s: float
    ) -> None:
        """Steps end at multiples of step_s plus offset_s."""
        self._worker_id = worker_id
        self._num_kv_blocks = num_kv_blocks
        self._step_s = step_s
        self._offset_s = offset_s
        self._incarnation = uuid.uuid4().hex

    async def Describe(self, _request: Any, _context: Any) -> gpuworker_pb2.DescribeResponse:  # noqa: N802
        """Describes a large worker."""
        return gpuworker_pb2.DescribeResponse(
            worker=common_pb2.Worker(
                worker_id=self._worker_id,
                incarnation=self._incarnation,
                model=MODEL,
                role=common_pb2.WORKER_ROLE_MIXED,
                state=common_pb2.WORKER_STATE_READY,
                max_model_len=131_072,
                block_size=16,
                num_kv_blocks=self._num_kv_blocks,
                max_num_seqs=MAX_NUM_SEQS,
                vocab_size=VOCAB_SIZE,
                max_num_batched_tokens=65_536,
                device="none",
                dtype="none",
            )
        )

    async def Execute(  # noqa: N802
        self, plans: AsyncIterator[gpuworker_pb2.StepPlan], context: Any
    ) -> AsyncIterator[gpuworker_pb2.StepResult]:
        """Returns one result for each plan."""
        term = terms.term_in(context.invocation_metadata()) or 0
        await context.send_initial_metadata(terms.metadata_of(term))
        rows = Rows()
        async for plan in plans:
            if self._step_s:
                now = time.monotonic()
                await asyncio.sleep(self._step_s - (now - self._offset_s) % self._step_s)
            yield rows.step(plan)


async def serve(
    step_s: float, num_workers: int, num_kv_blocks: int, process: ProcessConfig
) -> None:
    servers = []
    for number in range(num_workers):
        server = GrpcServer(ServingConfig(), ["headrace.v1.GpuWorker"])
        offset_s = step_s * number / num_workers
        worker = InstantWorker(f"instant-{number}", num_kv_blocks, step_s=step_s, offset_s=offset_s)
        gpuworker_pb2_grpc.add_GpuWorkerServicer_to_server(worker, server.server)
        servers.append(server)
    addresses = [await server.start() for server in servers]
    for server in servers:
        server.set_serving(True)
    stop = stop_asked()
    write_address(process, ",".join(addresses))
    await stop.wait()
    for server in servers:
        await server.stop(0)


@click.command()
@click.option("--step-ms", default=0.0, help="How long a step takes.")
@click.option("--num-workers", default=1, help="Each with a port of its own.")
@click.option("--num-kv-blocks", default=200_000, help="Of each.")
@click.option("--address-file", required=True)
def main(step_ms: float, num_workers: int, num_kv_blocks: int, address_file: str) -> None:
    """Answer plans until SIGTERM; writes the addresses, comma-separated, to the file."""
    process = ProcessConfig(address_file=address_file)
    run("instant_worker", process, serve(step_ms / 1000, num_workers, num_kv_blocks, process))


if __name__ == "__main__":
    main()
