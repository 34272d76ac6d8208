"""Applies a load to a running Inference endpoint and prints the figures.

    python -m benchmarks.load --target 127.0.0.1:8700 --clients 8
    python -m benchmarks.load --target 127.0.0.1:8700 --rate 4 --max-seconds 60
    python -m benchmarks.load --target 127.0.0.1:8700 --trace azure_conv_2023.csv --speed 5

A closed loop keeps N clients busy, each with one request at a time. An open loop sends at times
that do not depend on the server: `--rate` at random (Poisson), `--trace` as recorded.
"""

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.figures import Figures, Timing, as_json, figures_of, table
from benchmarks.workloads import (
    Ask,
    Scale,
    WorkloadError,
    poisson,
    prompt_of,
    read_trace,
    synthetic,
)
from headrace.client import ChannelConfig, HeadraceClient, Sampling, ServiceError
from headrace.vocabulary import FinishReason

# With more concurrent requests than this, an open loop's server has stopped answering.
_MAX_IN_FLIGHT = 4096
_FAILED = {FinishReason.ABORTED, FinishReason.ERROR, FinishReason.DEADLINE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. clients > 0 is a closed loop over `asks`; else each ask is sent at its time.

    Nothing is sent after max_s; requests running then have grace_s to end, and count as UNFINISHED
    after that.
    """

    asks: Iterable[Ask]
    title: str
    clients: int = 0
    max_s: float = 60.0
    grace_s: float = 30.0
    seed: int = 0
    model: str = ""


class Generator:
    """Sends one load through one client and records the time of each token."""

    def __init__(self, client: HeadraceClient, load: Load, vocab_size: int) -> None:
        self._client = client
        self._load = load
        self._vocab_size = vocab_size
        self._timings: list[Timing] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._start_s = 0.0

    async def run(self) -> Figures:
        """Sends the whole load; returns the figures of the requests sent."""
        self._start_s = time.perf_counter()
        numbered = enumerate(self._load.asks)
        sending = self._closed(numbered) if self._load.clients else self._open(numbered)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._load.max_s + self._load.grace_s):
                await sending
                if self._tasks:
                    await asyncio.wait(self._tasks)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return figures_of(self._timings, time.perf_counter() - self._start_s)

    async def _closed(self, numbered: Iterator[tuple[int, Ask]]) -> None:
        async def client() -> None:
            for number, ask in numbered:
                if self._elapsed() >= self._load.max_s:
                    return
                await self._send(number, ask)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._load.clients):
                tasks.create_task(client())

    async def _open(self, numbered: Iterator[tuple[int, Ask]]) -> None:
        for number, ask in numbered:
            if ask.at_s >= self._load.max_s:
                return
            await asyncio.sleep(ask.at_s - self._elapsed())
            due_s = self._start_s + ask.at_s
            if len(self._tasks) >= _MAX_IN_FLIGHT:
                self._timings.append(Timing(due_s, error="NOT_SENT"))
                continue
            task = asyncio.create_task(self._send(number, ask, due_s))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _elapsed(self) -> float:
        return time.perf_counter() - self._start_s

    async def _send(self, number: int, ask: Ask, due_s: float | None = None) -> None:
        """due_s None: the request is due as soon as its prompt is generated."""
        prompt = prompt_of(ask, number, self._vocab_size, self._load.seed)
        timing = Timing(
            time.perf_counter() if due_s is None else due_s,
            num_prompt_tokens=ask.num_prompt_tokens,
            error="UNFINISHED",
        )
        self._timings.append(timing)
        sampling = Sampling(
            temperature=0.0, max_tokens=ask.num_output_tokens, ignore_eos=True, seed=number
        )
        timing.sent_s = time.perf_counter()
        try:
            stream = self._client.generate(prompt, model=self._load.model, sampling=sampling)
            async with contextlib.aclosing(stream) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        timing.token_times.append((time.perf_counter(), len(delta.token_ids)))
                    if delta.usage is not None:
                        timing.num_cached_tokens = delta.usage.cached_tokens
                    if delta.finish_reason is not None:
                        is_bad = delta.finish_reason in _FAILED or not timing.token_times
                        timing.error = str(delta.finish_reason).upper() if is_bad else ""
        except ServiceError as error:
            timing.error = error.reason
        timing.end_s = time.perf_counter()


async def run_load(client: HeadraceClient, load: Load) -> Figures:
    """Run a load against the client's server."""
    models = {model.name: model for model in await client.models()}
    if not models or (load.model and load.model not in models):
        raise click.ClickException(f"the server has models {sorted(models)}, not {load.model!r}")
    model = models[load.model] if load.model else next(iter(models.values()))
    return await Generator(client, load, model.vocab_size).run()


@click.command(context_settings={"max_content_width": 100, "show_default": True})
@click.option("--target", required=True, help="host:port of a router.")
@click.option("--model", default="", help="Model name; may be left out if there is one only.")
@click.option("--clients", type=click.IntRange(1), help="Closed loop with so many clients.")
@click.option("--rate", type=click.FloatRange(0, min_open=True), help="Open loop, requests/s.")
@click.option("--trace", type=click.Path(path_type=Path), help="Open loop, times of this file.")
@click.option("--prompt-tokens", default=128, type=click.IntRange(1), help="Mean length.")
@click.option("--output-tokens", default=64, type=click.IntRange(1), help="Mean length.")
@click.option("--spread", default=0.5, type=click.FloatRange(0, 1), help="Lengths, +- fraction.")
@click.option("--speed", default=1.0, type=click.FloatRange(0, min_open=True), help="Trace time.")
@click.option("--scale-tokens", default=1.0, help="Trace lengths times this.")
@click.option("--max-prompt-tokens", default=0, help="Trace prompts at most; 0: no cap.")
@click.option("--max-output-tokens", default=0, help="Trace outputs at most; 0: no cap.")
@click.option("--max-requests", default=200, type=click.IntRange(1), help="Send at most.")
@click.option("--max-seconds", default=60.0, help="Send for at most.")
@click.option("--seed", default=0, help="Of arrivals, lengths and prompts.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
@click.option("--tls-ca-file", default="", help="Authorities to trust; turns TLS on.")
@click.option("--auth-token-file", default="", help="File with a bearer token.")
def main(
    *,
    target: str,
    model: str,
    max_seconds: float,
    seed: int,
    json_file: Path | None,
    tls_ca_file: str,
    auth_token_file: str,
    **shape: Any,
) -> None:
    """Load an Inference endpoint and print TTFT, TPOT, ITL, E2E and throughput."""
    load = load_of(model=model, max_s=max_seconds, seed=seed, **shape)
    channel = ChannelConfig(tls_ca_file=tls_ca_file, auth_token_file=auth_token_file)

    async def run() -> Figures:
        async with HeadraceClient(target, channel) as client:
            return await run_load(client, load)

    try:
        figures = asyncio.run(run())
    except ServiceError as error:
        raise click.ClickException(error.message) from error
    click.echo(table(load.title, figures))
    if json_file is not None:
        json_file.write_text(json.dumps({load.title: as_json(figures)}, indent=1) + "\n")
    if not figures.num_ok:
        raise SystemExit(1)


def load_of(
    *,
    clients: int | None = None,
    rate: float | None = None,
    trace: Path | None = None,
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    spread: float = 0.5,
    speed: float = 1.0,
    scale_tokens: float = 1.0,
    max_prompt_tokens: int = 0,
    max_output_tokens: int = 0,
    max_requests: int = 200,
    model: str = "",
    max_s: float = 60.0,
    seed: int = 0,
) -> Load:
    """The load that the flags describe."""
    if (clients is not None) + (rate is not None) + (trace is not None) != 1:
        raise click.UsageError("give one of --clients, --rate, --trace")
    if trace is not None:
        scale = Scale(
            speed=speed,
            tokens=scale_tokens,
            max_prompt_tokens=max_prompt_tokens,
            max_output_tokens=max_output_tokens,
        )
        try:
            asks: Iterable[Ask] = read_trace(trace, scale, max_requests)
        except WorkloadError as error:
            raise click.ClickException(str(error)) from error
        title = f"{trace.name}, {speed:g} times as fast, lengths times {scale_tokens:g}"
        return Load(asks=asks, title=title, model=model, max_s=max_s, seed=seed)
    arrivals: Iterator[float] = itertools.repeat(0.0) if rate is None else poisson(rate, seed)
    asks = itertools.islice(
        synthetic(arrivals, prompt_tokens, output_tokens, spread, seed), max_requests
    )
    kind = f"closed loop, {clients} clients" if rate is None else f"open loop, {rate:g} requests/s"
    title = f"{kind}, about {prompt_tokens} + {output_tokens} tokens"
    return Load(asks=asks, title=title, clients=clients or 0, model=model, max_s=max_s, seed=seed)


if __name__ == "__main__":
    main()
