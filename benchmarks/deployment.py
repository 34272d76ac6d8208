"""The services as in production, each in its own process, with a worker that runs no model."""

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import click
import grpc.aio
import psutil

from benchmarks.instant_worker import MODEL
from headrace.service.children import tied_to_us
from headrace.status.embedded import EmbeddedStore
from headrace.v1 import inference_pb2, inference_pb2_grpc

# Several connections, as with several clients; HTTP/2 limits the streams of a connection.
_NUM_CONNECTIONS = 8


class Deployment:
    """The service processes, and client stubs connected to one of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: dict[str, psutil.Process] = {}
        self._children: list[subprocess.Popen[bytes]] = []
        self._channels: list[grpc.aio.Channel] = []
        self.stubs: list[Any] = []

    def start(self, module: str, *flags: str) -> str:
        """Start one of Headrace's programs; returns its address."""
        name = module.rpartition(".")[2]
        file = self._folder / f"{name}.address"
        command = [sys.executable, "-m", module, "--address-file", str(file), *flags]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._children.append(subprocess.Popen(tied_to_us(command), stderr=log))
        self.processes[name] = psutil.Process(self._children[-1].pid)
        deadline = time.monotonic() + 60
        while not file.exists():
            if self._children[-1].poll() is not None or time.monotonic() > deadline:
                raise click.ClickException((self._folder / f"{name}.log").read_text())
            time.sleep(0.02)
        return file.read_text()

    def observed(self) -> tuple[str, ...]:
        """Flags of a service with metrics and traces; a collector must have been started."""
        file = self._folder / f"{len(self._children)}.admin"
        endpoint = (self._folder / "collector.address").read_text()
        return (
            *("--otlp-endpoint", f"http://{endpoint}"),
            *("--admin-listen", "127.0.0.1:0", "--admin-address-file", str(file)),
        )

    def connect(self, address: str) -> None:
        """Open the client's connections."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        self._channels = [
            grpc.aio.insecure_channel(address, options=options) for _ in range(_NUM_CONNECTIONS)
        ]
        self.stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]

    async def stop(self) -> None:
        """Close the connections and end the processes in reverse order of their start."""
        for channel in self._channels:
            await channel.close()
        for child in reversed(self._children):
            child.terminate()
            child.wait(30)

    def cpu_s(self) -> dict[str, float]:
        """CPU time of each service process and of this process, the client."""
        processes = self.processes | {"client": psutil.Process()}
        return {name: _cpu_s(process) for name, process in processes.items()}

    def rss_bytes(self) -> dict[str, int]:
        """Memory of each process."""
        return {name: process.memory_info().rss for name, process in self.processes.items()}

    @contextmanager
    def measured(
        self, result: dict[str, Any], unit: str, count: Callable[[], int]
    ) -> Iterator[None]:
        """Measures the `with` body: adds count, rate and CPU microseconds per unit."""
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
async def deployment(
    step_ms: float = 0.0,
    num_workers: int = 1,
    *,
    num_kv_blocks: int = 200_000,
    has_store: bool = False,
    is_observed: bool = False,
) -> AsyncIterator[Deployment]:
    """All services, started and with a model ready; observed ones export metrics and traces."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ours = Deployment(folder)
        store_flags: list[str] = []
        if has_store:
            store = await stack.enter_async_context(EmbeddedStore())
            store_flags = ["--store-url", store.url]
            ours.processes["store"] = psutil.Process(store.pid)
        stack.push_async_callback(ours.stop)
        workers = ours.start(
            *("benchmarks.instant_worker", "--step-ms", str(step_ms)),
            *("--num-workers", str(num_workers), "--num-kv-blocks", str(num_kv_blocks)),
        )
        worker_flags = [flag for one in workers.split(",") for flag in ("--worker", one)]
        if is_observed:
            ours.start("benchmarks.collector")
        flags = (*store_flags, *(ours.observed() if is_observed else ()))
        scheduler = ours.start("scheduler", *worker_flags, *flags)
        model_flags = ["--model", str(_write_model(folder)), "--model-name", MODEL]
        flags = (*store_flags, *(ours.observed() if is_observed else ()))
        ours.connect(ours.start("router", "--scheduler", scheduler, *model_flags, *flags))
        while not await _has_workers(ours.stubs[0], num_workers):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        yield ours


@asynccontextmanager
async def bare_server(step_ms: float = 0.0) -> AsyncIterator[Deployment]:
    """The floor: a server on the same gRPC library that only writes messages."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Deployment(Path(folder))
        try:
            ours.connect(ours.start("benchmarks.bare_server", "--step-ms", str(step_ms)))
            yield ours
        finally:
            await ours.stop()


def request(max_tokens: int, request_id: str = "") -> inference_pb2.GenerateRequest:
    """A request with four prompt tokens that generates exactly max_tokens."""
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids={"ids": [1, 2, 3, 4]},
        sampling={"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True},
    )


async def _has_workers(stub: Any, num_workers: int) -> bool:
    models = (await stub.ListModels(inference_pb2.ListModelsRequest())).models
    return any(model.num_ready_workers == num_workers for model in models)


def _cpu_s(process: psutil.Process) -> float:
    """Processor time of a process's threads; Linux knows it to the nanosecond."""
    threads = Path(f"/proc/{process.pid}/task")
    try:
        return sum(int(t.read_text().split()[0]) for t in threads.glob("*/schedstat")) / 1e9
    except OSError:
        times = process.cpu_times()
        return float(times.user + times.system)


def _write_model(folder: Path) -> Path:
    """Writes the smallest model folder that a router accepts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: token_id for token_id, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return folder
