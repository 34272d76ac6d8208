"""The load generator against a server that answers without a model."""

import asyncio
import json
from itertools import islice, repeat

import click
import pytest
from click.testing import CliRunner

from benchmarks.load import Load, load_of, main, run_load
from benchmarks.workloads import Ask, synthetic
from headrace.client import HeadraceClient
from headrace.service.errors import exhausted
from headrace.service.serving import GrpcServer, ServingConfig
from headrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc


class EchoServer(inference_pb2_grpc.InferenceServicer):
    """Gives max_tokens tokens; refuses seeds in `refused`, hangs on those in `hanging`."""

    def __init__(self) -> None:
        self.refused: set[int] = set()
        self.hanging: set[int] = set()
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.num_now = 0
        self.num_most = 0

    async def ListModels(self, request, context):
        model = inference_pb2.Model(name="echo", vocab_size=500, num_ready_workers=1)
        return inference_pb2.ListModelsResponse(models=[model])

    async def Generate(self, request, context):
        self.requests.append(request)
        self.num_now += 1
        self.num_most = max(self.num_most, self.num_now)
        try:
            if request.sampling.seed in self.refused:
                raise exhausted("QUEUE_FULL", "full")
            if request.sampling.seed in self.hanging:
                await asyncio.Event().wait()
            for position in range(request.sampling.max_tokens):
                await asyncio.sleep(0)
                is_last = position == request.sampling.max_tokens - 1
                yield inference_pb2.GenerateResponse(
                    request_id=request.request_id,
                    outputs=[
                        inference_pb2.OutputDelta(
                            token_ids=[7],
                            first_token_position=position,
                            finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else None,
                        )
                    ],
                    usage=inference_pb2.Usage(cached_tokens=2) if is_last else None,
                )
        finally:
            self.num_now -= 1


@pytest.fixture
async def server():
    servicer = EchoServer()
    server = GrpcServer(ServingConfig(), ["headrace.v1.Inference"])
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.server)
    servicer.address = await server.start()
    yield servicer
    await server.stop(0)


async def figures(server: EchoServer, load: Load):
    async with HeadraceClient(server.address) as client:
        return await run_load(client, load)


def asks(count: int) -> list[Ask]:
    return list(islice(synthetic(repeat(0.0), 20, 5, 0.0, seed=1), count))


async def test_a_closed_loop_keeps_its_clients_busy_and_no_more(server):
    result = await figures(server, Load(asks=asks(30), title="", clients=3))
    assert (result.num_requests, result.num_ok) == (30, 30)
    assert server.num_most == 3
    assert result.num_output_tokens == 150
    assert (result.num_prompt_tokens, result.num_cached_tokens) == (600, 60)
    assert {len(r.token_ids.ids) for r in server.requests} == {20}
    assert all(r.sampling.ignore_eos for r in server.requests)


async def test_an_open_loop_does_not_wait_for_answers(server):
    server.hanging = {0, 1, 2, 3}
    load = Load(asks=asks(6), title="", max_s=5.0, grace_s=-4.7)
    result = await figures(server, load)
    assert server.num_most >= 4
    assert result.errors == {"UNFINISHED": 4}
    assert result.num_ok == 2


async def test_refusals_count_by_their_reason(server):
    server.refused = {1, 4}
    result = await figures(server, Load(asks=asks(6), title="", clients=2))
    assert result.errors == {"QUEUE_FULL": 2}
    assert result.num_ok == 4


async def test_a_closed_loop_stops_when_its_time_is_over(server):
    endless = synthetic(repeat(0.0), 20, 5, 0.0, seed=1)
    result = await figures(server, Load(asks=endless, title="", clients=2, max_s=0.2))
    assert result.num_ok > 2
    assert result.duration_s < 5
    assert not result.errors


async def test_requests_after_the_time_are_not_sent(server):
    sent = [Ask(0.0, 5, 2), Ask(0.01, 5, 2), Ask(9.0, 5, 2)]
    result = await figures(server, Load(asks=sent, title="", max_s=0.5))
    assert (result.num_requests, result.num_ok) == (2, 2)
    assert result.duration_s < 5


async def test_a_model_that_is_not_served_is_named(server):
    with pytest.raises(click.ClickException, match="echo"):
        await figures(server, Load(asks=asks(1), title="", clients=1, model="other"))


async def test_the_command_prints_a_table_and_writes_json(server, tmp_path):
    file = tmp_path / "out.json"
    arguments = ["--target", server.address, "--rate", "200", "--max-requests", "5"]
    result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--json", str(file)])
    assert result.exit_code == 0, result.output
    assert "TTFT" in result.output
    (written,) = json.loads(file.read_text()).values()
    assert written["num_ok"] == 5


@pytest.mark.parametrize("flags", [[], ["--rate", "1", "--clients", "2"]])
def test_exactly_one_kind_of_load_is_asked_for(flags):
    result = CliRunner().invoke(main, ["--target", "127.0.0.1:1", *flags])
    assert result.exit_code == 2
    assert "one of --clients, --rate, --trace" in result.output


def test_a_trace_that_is_none_is_an_error_without_traceback(tmp_path):
    result = CliRunner().invoke(
        main, ["--target", "127.0.0.1:1", "--trace", str(tmp_path / "no.csv")]
    )
    assert result.exit_code == 1
    assert "no.csv" in result.output


def test_the_same_flags_make_the_same_load():
    one, other = (list(load_of(rate=5.0, max_requests=20, seed=4).asks) for _ in range(2))
    assert one == other
