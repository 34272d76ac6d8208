"""`make chaos ARGS="--seed N --minutes M"`: kills parts of a cluster, and checks the clients."""

import asyncio
import logging
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import click

from tests.chaos import killer, wanted
from tests.chaos.cluster import Shape
from tests.chaos.run import Run, run
from tests.chaos.tally import Tally

_REAL: dict[str, str] = {"model": "smollm2-135m-instruct", "model_name": "smollm2"}


@click.command()
@click.option("--seed", type=int, default=None, help="Draws load and kills; random by default.")
@click.option("--minutes", default=2.0, help="How long to kill.")
@click.option("--kills", default=0, help="Ends after so many SIGKILLs, if that is sooner.")
@click.option("--clients", default=16, help="Requests at once.")
@click.option("--interval-s", default=1.0, help="Mean time between disturbances.")
@click.option("--store", type=click.Choice(["single", "sentinel", "cluster"]), default="single")
@click.option("--model", type=click.Choice(["stub", "real"]), default="stub")
@click.option("--only", multiple=True, help="Only this disturbance (repeatable); each as often.")
@click.option("--does", multiple=True, help="Only this behaviour of clients (repeatable).")
@click.option("--patience-s", default=90.0, help="How long the end may take to be clean.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep logs and data there.")
def main(
    seed: int | None,
    minutes: float,
    kills: int,
    clients: int,
    interval_s: float,
    store: str,
    model: str,
    only: tuple[str, ...],
    does: tuple[str, ...],
    patience_s: float,
    folder: Path | None,
) -> None:
    """Kill at random for some minutes; the exit code is 1 if anything was violated."""
    plan = Run(
        seed=secrets.randbits(31) if seed is None else seed,
        run_s=minutes * 60,
        max_kills=kills,
        num_clients=clients,
        interval_s=interval_s,
        shape=Shape(store=store, **(_REAL if model == "real" else {})),
        weights=dict.fromkeys(only, 1) or killer.WEIGHTS,
        behaviours=frozenset(does or wanted.WEIGHTS),
        patience_s=patience_s,
    )
    tally, began_s = Tally(), time.monotonic()
    print(f"seed {plan.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        where = folder or Path(scratch)
        where.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(
            filename=where / "chaos.log", level=logging.INFO, format="%(asctime)s %(message)s"
        )
        asyncio.run(_run(plan, where, tally))
    print(report(plan, tally, time.monotonic() - began_s))
    sys.exit(bool(tally.violations))


async def _run(plan: Run, folder: Path, tally: Tally) -> None:
    """Runs it, and says every half a minute how it goes."""

    async def tell() -> None:
        num_told = 0
        while True:
            await asyncio.sleep(30)
            for what in tally.violations[num_told:]:
                print(f"VIOLATION {what}", flush=True)
            num_told = len(tally.violations)
            print(
                f"{tally.num_sigkills} SIGKILLs, {tally.requests.total()} requests,"
                f" {len(tally.violations)} violations",
                flush=True,
            )

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _print_tasks)
    telling = asyncio.create_task(tell())
    await run(plan, folder, tally)
    telling.cancel()


def _print_tasks() -> None:
    """Prints where each task waits, for a run that does not end."""
    for task in asyncio.all_tasks():
        task.print_stack(file=sys.stdout)
    sys.stdout.flush()


def report(plan: Run, tally: Tally, elapsed_s: float) -> str:
    """The figures of a run."""
    lines = [
        f"ran {elapsed_s:.0f} s, {tally.requests.total()} requests, {tally.num_sigkills} SIGKILLs",
        "disturbances: " + _listed(tally.kills),
        "requests: " + _listed(tally.requests),
        "events: " + _listed(tally.events),
        f"recovery time p50 {tally.recovery_s_at(50):.2f} s, p99 {tally.recovery_s_at(99):.2f} s",
        *(f"VIOLATION {what}" for what in tally.violations),
        f"violations: {len(tally.violations)}",
        f"seed: {plan.seed}",
    ]
    return "\n".join(lines)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))


if __name__ == "__main__":
    main()
