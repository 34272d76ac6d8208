"""`make bench-durability`: what keeping requests in the status store costs, at 64 streams.

Two stacks that differ in nothing but the store run side by side and take turns in one run, so that
both see the same machine. No model runs: the worker answers at once (the control plane is the
limit, the hardest case), or every 20 ms (the pace of a GPU). The ratio of a turn's rate with the
store to the rate of the turn without it is the cost; medians over the turns.
"""

import asyncio
import json
import os
import statistics
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import click
import uvloop

from benchmarks.control import shown
from benchmarks.deployment import Deployment, deployment, request

_NUM_CLIENTS = 64

Result = dict[str, Any]


async def turn(ours: Deployment, num_tokens: int) -> Result:
    """64 clients that each read one stream."""
    result: Result = {}
    num_got = 0

    async def one(stub: Any) -> None:
        nonlocal num_got
        async for message in stub.Generate(request(num_tokens)):
            num_got += sum(len(output.token_ids) for output in message.outputs)

    with ours.measured(result, "token", lambda: num_got):
        stubs = ours.stubs
        await asyncio.gather(*(one(stubs[n % len(stubs)]) for n in range(_NUM_CLIENTS)))
    return result


async def compare(step_ms: float, num_tokens: int, num_turns: int) -> Result:
    """Turns with and without the store, and the medians of both."""
    turns: dict[str, list[Result]] = {"no store": [], "store": []}
    async with AsyncExitStack() as stack:
        stacks = {
            name: await stack.enter_async_context(deployment(step_ms, has_store=name == "store"))
            for name in turns
        }
        for number in range(num_turns + 1):
            for name in sorted(turns, reverse=bool(number % 2)):
                result = await turn(stacks[name], num_tokens)
                if number:  # the first turn warms up
                    turns[name].append(result)
    rates = {name: [r["tokens_per_s"] for r in results] for name, results in turns.items()}
    ratios = [a / b for a, b in zip(rates["store"], rates["no store"], strict=True)]
    return {
        "turns": num_turns,
        "ratio": round(statistics.median(ratios), 3),
        "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
        **{
            f"cpu_us, {name}": {
                process: statistics.median(r["cpu_us_per_token"][process] for r in results)
                for process in results[0]["cpu_us_per_token"]
            }
            for name, results in turns.items()
        },
    }


async def run(num_turns: int) -> Result:
    results: Result = {}
    for title, step_ms, num_tokens in (
        ("steps at once", 0.0, 2000),
        ("a step every 20 ms", 20.0, 150),
    ):
        results[title] = await compare(step_ms, num_tokens, num_turns)
        click.echo(shown(title, results[title]))
    return results


@click.command(context_settings={"show_default": True})
@click.option("--turns", default=9, help="Turns of each stack.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
def main(turns: int, json_file: Path | None) -> None:
    """Measure the cost of durability on this machine."""
    os.environ["HEADRACE_PARENT_DEATH"] = "1"
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(run(turns))
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
