"""Compares two stacks that run side by side and take turns, so that both see the same machine.

A turn is short, and is compared with the other stack's turn beside it: what else runs on the
machine changes slowly against that, and falls out of the comparison. Which stack comes first
changes from pair to pair. The processor time of a stack is that of its pair's whole time, so that
what a stack does while the other has its turn (an export, a scrape) counts, too.
"""

import asyncio
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.deployment import Deployment, request

_NUM_CLIENTS = 64
# The processes whose processor time a token costs; the worker is none of ours, and runs no model.
_SERVICES = ("router", "scheduler")

Result = dict[str, Any]


async def take_turns(stacks: Mapping[str, Deployment], num_tokens: int, num_turns: int) -> Result:
    """64 streams on each stack in turn.

    Args:
        stacks: the one without what is measured, then the one with it.
        num_tokens: of each stream.
        num_turns: of each stack.

    Returns:
        Medians over the pairs of turns. A list is a median and its 95 % interval, of what each pair
        gives: of the second stack's rate or processor time over the first one's, and of the
        difference in microseconds of processor time a token, of router and scheduler together.
        quiet_cpu_us_more is that difference in the turns that the machine disturbed least.
    """
    pairs = []
    for number in range(num_turns + 1):
        pair = await _pair(stacks, num_tokens, is_reversed=bool(number % 2))
        if number:  # the first pair warms up
            pairs.append(pair)
    without, with_it = (_columns(pairs, name) for name in stacks)
    services = list(zip(with_it["services"], without["services"], strict=True))
    rates = list(zip(with_it["tokens_per_s"], without["tokens_per_s"], strict=True))
    return {
        "turns": num_turns,
        "rate_ratio": median_of([a / b for a, b in rates]),
        "cpu_ratio": median_of([a / b for a, b in services]),
        "cpu_us_more": median_of([a - b for a, b in services]),
        "quiet_cpu_us_more": quiet_difference(services),
        "tokens_per_s": {
            name: statistics.median(_columns(pairs, name)["tokens_per_s"]) for name in stacks
        },
        **{
            f"cpu_us, {name}": {
                process: round(statistics.median(found), 1)
                for process, found in _columns(pairs, name).items()
                if process not in {"tokens_per_s", "services"}
            }
            for name in stacks
        },
    }


def _columns(pairs: Sequence[Result], name: str) -> dict[str, list[float]]:
    """Of one stack, in each pair: the rate, and microseconds a token of each process."""
    turns = [pair[name] for pair in pairs]
    return {
        "tokens_per_s": [turn["tokens_per_s"] for turn in turns],
        "services": [sum(turn["cpu_us"][s] for s in _SERVICES) for turn in turns],
        **{process: [turn["cpu_us"][process] for turn in turns] for process in turns[0]["cpu_us"]},
    }


def median_of(values: Sequence[float]) -> list[float]:
    """The median and its 95 % interval, which presumes nothing of the distribution."""
    ordered, num = sorted(values), len(values)
    reach = 0.98 * math.sqrt(num)
    least, most = math.floor(num / 2 - reach), math.ceil(num / 2 + reach)
    found = statistics.median(ordered), ordered[max(0, least)], ordered[min(num - 1, most)]
    return [round(value, 3) for value in found]


def quiet_difference(pairs: Sequence[tuple[float, float]]) -> list[float]:
    """First values less second ones, in the least disturbed turns; the interval is a bootstrap's.

    What else runs on the machine makes a turn dearer and never cheaper, so the cheapest tenth of
    each stack's turns are the nearest to a machine without other work.
    """
    found = np.array(pairs)  # [num_pairs, 2]
    chosen = np.random.default_rng(0).integers(len(found), size=(2_000, len(found)))
    low = np.quantile(found[chosen], 0.1, axis=1)  # [2_000, 2]
    least, most = np.quantile(low[:, 0] - low[:, 1], (0.025, 0.975))
    first, second = np.quantile(found, 0.1, axis=0)
    return [round(float(value), 3) for value in (first - second, least, most)]


async def _pair(stacks: Mapping[str, Deployment], num_tokens: int, *, is_reversed: bool) -> Result:
    """A turn of each stack, one after the other."""
    before = {name: stack.cpu_s() for name, stack in stacks.items()}
    turns = {}
    for name in sorted(stacks, reverse=is_reversed):
        turns[name] = await _turn(stacks[name], num_tokens)
    for name, stack in stacks.items():
        turns[name]["cpu_us"] = {
            process: (cpu_s - before[name][process]) / turns[name]["tokens"] * 1e6
            for process, cpu_s in stack.cpu_s().items()
            if process != "client"  # which is that of both stacks
        }
    return turns


async def _turn(ours: Deployment, num_tokens: int) -> Result:
    """64 clients that each read one stream."""
    num_got = 0

    async def one(stub: Any) -> None:
        nonlocal num_got
        async for message in stub.Generate(request(num_tokens)):
            num_got += sum(len(output.token_ids) for output in message.outputs)

    began, stubs = time.perf_counter(), ours.stubs
    await asyncio.gather(*(one(stubs[n % len(stubs)]) for n in range(_NUM_CLIENTS)))
    return {"tokens": num_got, "tokens_per_s": round(num_got / (time.perf_counter() - began))}
