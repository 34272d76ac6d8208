"""`python -m benchmarks.bare_server`: an Inference service without scheduler or worker.

The server writes max_tokens messages of one token and decides nothing, so its cost is a lower bound
on a router's cost. With --step-ms all streams get a token at each step, as from one worker.
"""

import asyncio
from typing import Any

import click
import grpc.aio

from benchmarks.instant_worker import stamp
from headrace.service.process import ProcessConfig, run, write_address
from headrace.service.serving import stop_asked
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class BareInference(inference_pb2_grpc.InferenceServicer):
    """Implements only Generate of headrace.v1.Inference."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._step: asyncio.Future[int] | None = None

    async def run(self) -> None:
        """Ends a step every step time, until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._step_s:
            self._step, done = loop.create_future(), self._step
            if done is not None:
                done.set_result(stamp())
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> None:
        """Messages of one token; the last message has the usage."""
        num_tokens = request.sampling.max_tokens
        for position in range(num_tokens):
            token_id = stamp() if self._step is None else await self._step
            response = inference_pb2.GenerateResponse(request_id=request.request_id)
            output = response.outputs.add(text="a", first_token_position=position)
            output.token_ids.append(token_id)
            if position + 1 == num_tokens:
                output.finish_reason = common_pb2.FINISH_REASON_LENGTH
                response.usage.completion_tokens = num_tokens
            await context.write(response)


async def serve(step_s: float, process: ProcessConfig) -> None:
    server = grpc.aio.server()
    service = BareInference(step_s)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stop = stop_asked()
    write_address(process, f"127.0.0.1:{port}")
    steps = asyncio.create_task(service.run())
    await stop.wait()
    steps.cancel()
    await server.stop(0)


@click.command()
@click.option("--step-ms", default=0.0, help="Between two tokens of a stream.")
@click.option("--address-file", required=True)
def main(step_ms: float, address_file: str) -> None:
    """Serve until SIGTERM."""
    process = ProcessConfig(address_file=address_file)
    run("bare_server", process, serve(step_ms / 1000, process))


if __name__ == "__main__":
    main()
