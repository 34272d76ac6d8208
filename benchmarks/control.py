"""`make bench-control`: the cost of router and scheduler, with a worker that answers at once.

Every service runs in its own process, as in production, but no model runs: all measured time is the
control plane's. Prints the throughput of streams and of one-token requests, the latency added to a
token, and each process's CPU time per token or request. Each figure stands beside its floor: the
cost of a bare gRPC server with the same client. CPU times compare better than rates, because load
on the machine lowers rates much more than it raises CPU time.

With --soak N: N requests instead, one in twenty aborted; prints each process's memory growth.
"""

import asyncio
import json
import os
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import click
import uvloop

from benchmarks.deployment import Deployment, bare_server, deployment, request
from benchmarks.instant_worker import age_s
from benchmarks.soak import soak

Started = AbstractAsyncContextManager[Deployment]
Result = dict[str, Any]


async def streams(started: Started, num_clients: int, num_tokens: int) -> Result:
    """Clients that each read one long stream."""
    result: Result = {"clients": num_clients}
    got = {"tokens": 0, "messages": 0}

    async def one(stub: Any) -> None:
        async for message in stub.Generate(request(num_tokens)):
            got["messages"] += 1
            for output in message.outputs:
                got["tokens"] += len(output.token_ids)

    async with started as ours:
        with ours.measured(result, "token", lambda: got["tokens"]):
            await _everywhere(ours, num_clients, one)
    return result | {"tokens_per_message": round(got["tokens"] / max(1, got["messages"]), 1)}


async def short_requests(started: Started, num_clients: int, num_requests: int) -> Result:
    """Clients that repeatedly ask for one token."""
    result: Result = {"clients": num_clients}
    num_sent = 0

    async def one(stub: Any) -> None:
        nonlocal num_sent
        while num_sent < num_requests:
            num_sent += 1
            async for _ in stub.Generate(request(1)):
                pass

    async with started as ours:
        with ours.measured(result, "request", lambda: num_sent):
            await _everywhere(ours, num_clients, one)
    return result


async def paced(started: Started, num_clients: int, num_tokens: int) -> Result:
    """Streams at a steady pace; the added latency is a token's age when the client receives it."""
    ages: list[float] = []

    async def one(stub: Any) -> None:
        async for message in stub.Generate(request(num_tokens)):
            ages.extend(age_s(t) for output in message.outputs for t in output.token_ids)

    result: Result = {"clients": num_clients}
    async with started as ours:
        with ours.measured(result, "token", lambda: len(ages)):
            await _everywhere(ours, num_clients, one)
    cuts = statistics.quantiles(ages[num_clients * 5 :], n=100)
    return result | {"latency_ms": {f"p{p}": round(cuts[p - 1] * 1000, 2) for p in (50, 90, 99)}}


async def _everywhere(
    ours: Deployment, num_clients: int, one: Callable[[Any], Awaitable[None]]
) -> None:
    """Run this many clients at once, over all connections."""
    stubs = ours.stubs
    await asyncio.gather(*(one(stubs[n % len(stubs)]) for n in range(num_clients)))


async def run(num_tokens: int, num_requests: int, max_s: float) -> Result:
    """Runs every measurement and prints each result at once."""
    results: Result = {}
    num_fast, num_slow = int(max_s / 0.020), int(max_s / 0.050)
    for title, measurement in (
        ("streams", streams(deployment(), 64, num_tokens)),
        ("streams, bare server", streams(bare_server(), 64, num_tokens // 4)),
        ("one-token requests", short_requests(deployment(), 64, num_requests)),
        ("one-token requests, bare server", short_requests(bare_server(), 64, num_requests)),
        ("paced, one stream", paced(deployment(20.0), 1, num_fast)),
        ("paced, one stream, bare server", paced(bare_server(20.0), 1, num_fast)),
        ("paced, 256 streams in one step", paced(deployment(50.0), 256, num_slow)),
        ("paced, 256 streams in one step, bare server", paced(bare_server(50.0), 256, num_slow)),
        ("paced, 256 streams on 16 workers", paced(deployment(50.0, 16), 256, num_slow)),
    ):
        results[title] = await measurement
        click.echo(shown(title, results[title]))
    return results


def shown(title: str, result: Result) -> str:
    """Formats a result for people: a line of counts, then a line for each nested result."""
    counts = (f"{value} {name}" for name, value in result.items() if not isinstance(value, dict))
    lines = [f"{title}: {', '.join(counts)}"]
    for name, parts in result.items():
        if isinstance(parts, dict):
            each = ", ".join(f"{part} {value:g}" for part, value in parts.items())
            lines.append(f"  {name:18}  {each}")
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--tokens", default=4000, help="Tokens of each of the 64 streams.")
@click.option("--requests", default=10_000, help="One-token requests.")
@click.option("--max-seconds", default=6.0, help="For each paced measurement.")
@click.option("--soak", "num_soaked", default=0, help="Requests to watch the memory over, instead.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
def main(
    tokens: int, requests: int, max_seconds: float, num_soaked: int, json_file: Path | None
) -> None:
    """Measure the control plane on this machine."""
    os.environ["HEADRACE_PARENT_DEATH"] = "1"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if num_soaked:
            results = runner.run(soak(num_soaked))
            click.echo(shown("soak", results))
        else:
            results = runner.run(run(tokens, requests, max_seconds))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
