"""One run: a cluster, a load, a killer, and the check at the end."""

import asyncio
import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tests.chaos import killer, wanted
from tests.chaos.checker import final_faults, num_stale_hints
from tests.chaos.cluster import ROUTERS, Cluster, Shape
from tests.chaos.load import Client
from tests.chaos.prepared import prepare
from tests.chaos.received import Received
from tests.chaos.tally import Tally

_CLOSE_S = 30.0
# A store is looked for every two seconds at least; another server takes its time to become the
# master, and a cluster to believe that a node is back.
_STORE_IS_BACK_AFTER_S = {"single": 3.0, "sentinel": 10.0, "cluster": 6.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What to run; ends after run_s, or at the so-manieth SIGKILL where max_kills is given.

    request_s: longer than any request is without news, even if its owners are killed often.
    patience_s: how long each check at the end may take. tail_s: within so long after run_s a run
    must end.
    """

    seed: int
    run_s: float
    max_kills: int = 0
    num_clients: int = 16
    interval_s: float = 1.0
    request_s: float = 300.0
    patience_s: float = 90.0
    tail_s: float = 900.0
    ends_at_violation: bool = False
    shape: Shape = field(default_factory=Shape)
    weights: Mapping[str, int] = field(default_factory=lambda: dict(killer.WEIGHTS))
    behaviours: frozenset[str] = frozenset(wanted.WEIGHTS)


async def run(plan: Run, folder: Path, tally: Tally) -> None:
    """Runs it and counts into the tally; a run that does not end is a violation."""
    running = asyncio.create_task(_run(plan, folder, tally))
    await asyncio.wait([running], timeout=plan.run_s + plan.tail_s)
    if running.done():
        return running.result()
    waits = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(limit=3, file=waits)
    tally.violation(f"the run does not end: {waits.getvalue()}")
    running.cancel()
    await asyncio.wait([running], timeout=_CLOSE_S)
    return None


async def _run(plan: Run, folder: Path, tally: Tally) -> None:
    ended: dict[str, Received] = {}
    async with Cluster(plan.shape, folder) as cluster:
        await cluster.until_ready()
        draw = await prepare(cluster.address(ROUTERS[0])) if plan.shape.model else _drawer(plan)
        deadline = time.monotonic() + plan.run_s

        def is_over() -> bool:
            is_enough = plan.max_kills and tally.num_sigkills >= plan.max_kills
            is_failed = plan.ends_at_violation and tally.violations
            return bool(is_enough or is_failed) or time.monotonic() > deadline

        addresses = {router: cluster.address(router) for router in ROUTERS}
        clients = [
            Client(
                f"c{i}",
                addresses,
                Random(f"{plan.seed}/client/{i}"),
                tally,
                ended,
                request_s=plan.request_s,
            )
            for i in range(plan.num_clients)
        ]
        tally.store_is_back_after_s = _STORE_IS_BACK_AFTER_S[plan.shape.store]
        killing = killer.Killer(cluster, Random(f"{plan.seed}/killer"), tally, dict(plan.weights))
        async with asyncio.TaskGroup() as tasks:
            for client in clients:
                tasks.create_task(client.run(draw, is_over))
            tasks.create_task(killing.run(plan.interval_s, is_over))
        is_store_exact = not any(what.endswith("store") for what in tally.kills)
        check = final_faults(
            cluster, ended, is_store_exact=is_store_exact, patience_s=plan.patience_s
        )
        for fault in await check:
            tally.violation(fault)
        tally.events["stale hints in the store"] = await num_stale_hints(cluster)
        tally.events["recomputed tokens"] = cluster.num_recomputed_tokens


def _drawer(plan: Run) -> Callable[[Random, str], wanted.Wanted]:
    return lambda rng, request_id: wanted.draw(rng, request_id, plan.behaviours)
