"""`make bench-control`: what router and scheduler cost, with a worker that answers at once.

Everything runs as it does in service, each in its own process, but no model: whatever time is
seen is the control plane's. Prints throughput of streams and of one-token requests, the latency
that is added to a token, and how memory grows; for each process, CPU time per token or request.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import click
import grpc.aio
import psutil
import uvloop

from benchmarks.instant_worker import MODEL, age_s
from headrace.service.children import tied_to_us
from headrace.v1 import inference_pb2, inference_pb2_grpc

# Several connections, as several clients have; HTTP/2 limits the streams of one.
_NUM_CONNECTIONS = 8


def write_model(folder: Path) -> Path:
    """The smallest model folder that a router takes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: token_id for token_id, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return folder


class Deployment:
    """The three processes and the stubs of a client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, psutil.Process] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        self.stubs: list[Any] = []

    def start(self, name: str, *flags: str) -> str:
        """Start a program of ours; returns its address."""
        file = self._folder / f"{name}.address"
        command = [sys.executable, "-m", name, "--address-file", str(file), *flags]
        log = (self._folder / f"{name}.log").open("wb")
        self._children.append(subprocess.Popen(tied_to_us(command), stderr=log))
        self.processes[name.rpartition(".")[2]] = psutil.Process(self._children[-1].pid)
        deadline = time.monotonic() + 60
        while not file.exists():
            if self._children[-1].poll() is not None or time.monotonic() > deadline:
                raise click.ClickException((self._folder / f"{name}.log").read_text())
            time.sleep(0.02)
        return file.read_text()

    def stop(self) -> None:
        for child in reversed(self._children):
            child.terminate()
            child.wait(30)

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each process, and of this one, the client."""
        processes = self.processes | {"client": psutil.Process()}
        times = {name: process.cpu_times() for name, process in processes.items()}
        return {name: t.user + t.system for name, t in times.items()}

    @contextmanager
    def measured(
        self, result: dict[str, Any], unit: str, count: Callable[[], int]
    ) -> Iterator[None]:
        """Adds seconds, rate and CPU microseconds per unit of what runs inside."""
        before, began = self.cpu_s(), time.perf_counter()
        yield
        elapsed_s, total = time.perf_counter() - began, max(1, count())
        result[f"{unit}s"] = total
        result[f"{unit}s_per_s"] = round(total / elapsed_s)
        result[f"cpu_us_per_{unit}"] = {
            name: round((cpu_s - before[name]) / total * 1e6, 1)
            for name, cpu_s in self.cpu_s().items()
        }


@asynccontextmanager
async def deployment(step_ms: float = 0.0) -> AsyncIterator[Deployment]:
    """Everything started, and a model ready."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = Deployment(folder)
        try:
            worker = ours.start("benchmarks.instant_worker", "--step-ms", str(step_ms))
            scheduler = ours.start("scheduler", "--worker", worker)
            router = ours.start(
                *("router", "--scheduler", scheduler, "--model", str(write_model(folder))),
                *("--model-name", MODEL),
            )
            options = [("grpc.use_local_subchannel_pool", 1)]
            channels = [
                grpc.aio.insecure_channel(router, options=options) for _ in range(_NUM_CONNECTIONS)
            ]
            ours.stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
            ask = inference_pb2.ListModelsRequest()
            while not (await ours.stubs[0].ListModels(ask)).models:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            yield ours
            for channel in channels:
                await channel.close()
        finally:
            ours.stop()


def request(max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids={"ids": [1, 2, 3, 4]},
        sampling={"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
    )


async def streams(num_clients: int, num_tokens: int) -> dict[str, Any]:
    """Clients that each read one long stream."""
    result: dict[str, Any] = {"clients": num_clients}
    got = {"tokens": 0, "messages": 0}

    async def one(stub: Any) -> None:
        async for message in stub.Generate(request(num_tokens)):
            got["messages"] += 1
            for output in message.outputs:
                got["tokens"] += len(output.token_ids)

    async with deployment() as ours:
        with ours.measured(result, "token", lambda: got["tokens"]):
            stubs = ours.stubs
            await asyncio.gather(*(one(stubs[n % len(stubs)]) for n in range(num_clients)))
    return result | {"tokens_per_message": round(got["tokens"] / max(1, got["messages"]), 1)}


async def short_requests(num_clients: int, num_requests: int) -> dict[str, Any]:
    """Clients that ask for one token, again and again; every twentieth is aborted at once.

    Memory is read when a fifth is done and at the end.
    """
    result: dict[str, Any] = {"clients": num_clients}
    done = 0
    rss: list[tuple[int, dict[str, int]]] = []

    async def one(stub: Any) -> None:
        nonlocal done
        while done < num_requests:
            done += 1
            call = stub.Generate(request(1))
            if done % 20 == 0:
                call.cancel()
                continue
            async for _ in call:
                pass
            if done >= num_requests * (1 + 4 * len(rss)) // 5:
                sizes = {name: p.memory_info().rss for name, p in ours.processes.items()}
                rss.append((done, sizes))

    async with deployment() as ours:
        with ours.measured(result, "request", lambda: done):
            stubs = ours.stubs
            await asyncio.gather(*(one(stubs[n % len(stubs)]) for n in range(num_clients)))
    if len(rss) > 1:
        (begin, before), (end, after) = rss[:2]
        result["rss_growth_bytes_per_request"] = {
            name: round((after[name] - before[name]) / (end - begin), 1) for name in after
        }
    return result


async def paced(num_clients: int, step_ms: float, max_s: float) -> dict[str, Any]:
    """Streams at a steady pace; a token's age when its client has it is the added latency."""
    ages: list[float] = []
    num_tokens = int(max_s * 1000 / step_ms)

    async def one(stub: Any) -> None:
        async for message in stub.Generate(request(num_tokens)):
            ages.extend(age_s(t) for output in message.outputs for t in output.token_ids)

    async with deployment(step_ms) as ours:
        stubs = ours.stubs
        await asyncio.gather(*(one(stubs[n % len(stubs)]) for n in range(num_clients)))
    cuts = statistics.quantiles(ages[num_clients * 5 :], n=100)
    percentiles = {f"p{p}": round(cuts[p - 1] * 1000, 2) for p in (50, 90, 99)}
    return {"clients": num_clients, "step_ms": step_ms, "latency_ms": percentiles}


async def run(num_tokens: int, num_requests: int, max_s: float) -> dict[str, Any]:
    """Every measurement, printed as it comes."""
    results: dict[str, Any] = {}
    for title, measure in (
        ("streams", lambda: streams(64, num_tokens)),
        ("one-token requests", lambda: short_requests(64, num_requests)),
        ("paced, one stream", lambda: paced(1, 20.0, max_s)),
        ("paced, 256 streams", lambda: paced(256, 50.0, max_s)),
    ):
        results[title] = await measure()
        click.echo(f"{title}: {json.dumps(results[title])}")
    return results


@click.command(context_settings={"show_default": True})
@click.option("--tokens", default=4000, help="Tokens of each of the 64 streams.")
@click.option("--requests", default=10_000, help="One-token requests.")
@click.option("--max-seconds", default=8.0, help="For each paced measurement.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
def main(tokens: int, requests: int, max_seconds: float, json_file: Path | None) -> None:
    """Measure the control plane on this machine."""
    os.environ["HEADRACE_PARENT_DEATH"] = "1"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(run(tokens, requests, max_seconds))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
