"""`make bench-store`: what it costs to keep requests in the store.

First the writer alone: the processor time of a writer and of the server for each 1,000 pieces of
journals. Then 64 streams through all services: two stacks that differ in nothing but the store run
side by side and take turns, so that both see the same machine. No model runs: the worker answers at
once (the control plane is the limit, the hardest case), or every 20 ms. CPU times
compare better than rates, because load on the machine lowers rates much more than it raises CPU
times (see `turns`).
"""

import asyncio
import json
import os
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import psutil
import uvloop

from benchmarks.control import shown
from benchmarks.deployment import deployment
from benchmarks.turns import take_turns
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

Result = dict[str, Any]


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


async def compare(step_ms: float, num_tokens: int, num_turns: int) -> Result:
    """Turns with and without the store."""
    async with AsyncExitStack() as stack:
        stacks = {
            name: await stack.enter_async_context(deployment(step_ms, has_store=name == "store"))
            for name in ("no store", "store")
        }
        return await take_turns(stacks, num_tokens, num_turns)


async def run(num_turns: int) -> Result:
    """Runs every measurement and prints each result at once."""
    results: Result = {}
    for batch_size in (1, 64, 128):
        title = f"1,000 pieces, {batch_size} to a batch"
        results[title] = await pieces(batch_size)
        click.echo(shown(title, results[title]))
    for title, step_ms, num_tokens in (
        ("64 streams, steps at once", 0.0, 2000),
        ("64 streams, a step every 20 ms", 20.0, 150),
    ):
        results[title] = await compare(step_ms, num_tokens, num_turns)
        click.echo(shown(title, results[title]))
    return results


@click.command(context_settings={"show_default": True})
@click.option("--turns", default=9, help="Turns of each stack.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
def main(turns: int, json_file: Path | None) -> None:
    """Measure what keeping requests costs on this machine."""
    os.environ["HEADRACE_PARENT_DEATH"] = "1"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(run(turns))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
