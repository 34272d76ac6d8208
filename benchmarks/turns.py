"""Compares two stacks that run side by side and take turns, so that both see the same machine."""

import asyncio
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.deployment import Deployment, request

_NUM_CLIENTS = 64

Result = dict[str, Any]


async def take_turns(stacks: Mapping[str, Deployment], num_tokens: int, num_turns: int) -> Result:
    """64 streams on each stack in turn.

    Args:
        stacks: the one without what is measured, then the one with it.
        num_tokens: of each stream.
        num_turns: of each stack.

    Returns:
        Medians over the turns; `ratio` is the second stack's rate over the first one's in a turn.
    """
    turns: dict[str, list[Result]] = {name: [] for name in stacks}
    for number in range(num_turns + 1):
        for name in sorted(turns, reverse=bool(number % 2)):
            result = await _turn(stacks[name], num_tokens)
            if number:  # the first turn warms up
                turns[name].append(result)
    without, with_it = [[r["tokens_per_s"] for r in results] for results in turns.values()]
    ratios = [a / b for a, b in zip(with_it, without, strict=True)]
    return {
        "turns": num_turns,
        "ratio": round(statistics.median(ratios), 3),
        "tokens_per_s": {
            name: statistics.median(r["tokens_per_s"] for r in results)
            for name, results in turns.items()
        },
        **{
            f"cpu_us, {name}": {
                process: statistics.median(r["cpu_us_per_token"][process] for r in results)
                for process in results[0]["cpu_us_per_token"]
            }
            for name, results in turns.items()
        },
    }


async def _turn(ours: Deployment, num_tokens: int) -> Result:
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
