"""`make bench-store`: what it costs to keep requests in the store.

First the writer alone: the processor time of a writer and of the server for each 1,000 pieces of
journals. Then 64 streams through all services, with a worker that answers at once, in alternating
runs with and without a store. Every process competes for the same processors, so the ratio is the
greatest loss of throughput that the store can cause. CPU times compare better than rates, because
load on the machine lowers rates much more than it raises CPU times.
"""

import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import click
import psutil
import uvloop

from benchmarks.control import shown, streams
from benchmarks.deployment import deployment
from headrace.status.batches import BatchWriter
from headrace.status.connect import Connection
from headrace.status.embedded import EmbeddedStore
from headrace.status.keys import Keys
from headrace.status.live import LiveIndex
from headrace.status.records import Tokens, Update
from headrace.status.scripts import write_script
from headrace.status.states import State, Writer
from headrace.status.store import StatusStore

_NUM_BATCHES = 200
_TOKENS_PER_PIECE = 4
_CREATED = time.time()


async def pieces(batch_size: int) -> dict[str, float]:
    """Milliseconds per 1,000 pieces, of the writer and of the server."""
    names = [f"request-{number}" for number in range(batch_size)]
    token_ids = bytes(4 * _TOKENS_PER_PIECE)
    async with EmbeddedStore() as server, StatusStore(server.url, Writer.ROUTER) as router:
        for name in names:
            for state in (State.QUEUED, State.DISPATCHED):
                await router.apply(_update(name, state))
        connection = Connection(server.url, 10.0)
        keys = Keys("headrace")
        live = LiveIndex(connection, keys, ttl_s=1000.0, clock=time.monotonic)
        script = write_script(Writer.SCHEDULER, live_ttl_ms=10**6, ended_ttl_ms=10**6)
        writer = BatchWriter(connection, keys, live, Writer.SCHEDULER, script)
        process = psutil.Process(server.pid)
        began = time.process_time(), _cpu_s(process)
        for number in range(_NUM_BATCHES):
            position = number * _TOKENS_PER_PIECE
            refused = await writer.evaluate([[_piece(name, position, token_ids)] for name in names])
            assert not refused, refused
        scale = 1e6 / _NUM_BATCHES / batch_size
        figures = {
            "writer_ms": round((time.process_time() - began[0]) * scale, 1),
            "server_ms": round((_cpu_s(process) - began[1]) * scale, 1),
        }
        await connection.aclose()
        return figures


def _piece(name: str, position: int, token_ids: bytes) -> Tokens:
    return Tokens(
        request_id=name,
        epoch=1,
        create_time_unix_s=_CREATED,
        position=position,
        token_ids=token_ids,
    )


def _update(name: str, state: State) -> Update:
    return Update(request_id=name, state=state, time_unix_s=_CREATED, create_time_unix_s=_CREATED)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def run(num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """Runs every measurement and prints each result at once."""
    results: dict[str, Any] = {}
    for batch_size in (1, 64, 128):
        title = f"1,000 pieces, {batch_size} to a batch"
        results[title] = await pieces(batch_size)
        click.echo(shown(title, results[title]))
    figures: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for _ in range(num_rounds):
        for has_store, title in ((False, "64 streams, no store"), (True, "64 streams, store")):
            result = await streams(deployment(has_store=has_store), 64, num_tokens)
            figures[has_store].append(result)
            click.echo(shown(title, result))
    results["streams"] = figures
    rates, times = _with_to_without(figures)
    results |= {"rate_ratio": rates, "cpu_time_ratio": times}
    click.echo(f"with a store to without: tokens a second {rates:.3f}, CPU a token {times:.3f}")
    return results


def _with_to_without(figures: dict[bool, list[dict[str, Any]]]) -> tuple[float, float]:
    """Ratios of the medians: of the rates, and of the CPU times of all processes per token."""
    rates, times = (
        [
            statistics.median(value(result) for result in figures[has_store])
            for has_store in (True, False)
        ]
        for value in (
            lambda result: result["tokens_per_s"],
            lambda result: sum(result["cpu_us_per_token"].values()),
        )
    )
    return round(rates[0] / rates[1], 3), round(times[0] / times[1], 3)


@click.command(context_settings={"show_default": True})
@click.option("--tokens", default=4000, help="Tokens of each of the 64 streams.")
@click.option("--rounds", default=5, help="Runs with a store, and as many without.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
def main(tokens: int, rounds: int, json_file: Path | None) -> None:
    """Measure what keeping requests costs on this machine."""
    os.environ["HEADRACE_PARENT_DEATH"] = "1"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(run(tokens, rounds))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
