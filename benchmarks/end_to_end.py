"""`make bench`: starts all services on this machine, applies three loads, stops the services."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import click

from benchmarks.figures import as_json, table
from benchmarks.load import Load, load_of, run_load
from headrace.client import HeadraceClient
from headrace.local import LocalConfig, LocalError, local_pool
from headrace.service.model_files import ModelFilesError, resolve

SAMPLE = Path(__file__).parent / "data" / "sample_conversations.jsonl"


def loads(max_s: float) -> list[Load]:
    """A closed loop, an open loop and a trace, each for at most max_s seconds."""
    # Seeds differ, so that no prompt of an earlier load is in the prefix cache.
    shape: dict[str, Any] = {
        "prompt_tokens": 64,
        "output_tokens": 32,
        "max_requests": 32,
        "max_s": max_s,
    }
    return [
        load_of(clients=4, seed=1, **shape),
        load_of(rate=1.0, seed=2, **shape),
        load_of(trace=SAMPLE, seed=3, max_requests=32, max_s=max_s),
    ]


async def run(model: str, max_s: float, worker_flags: list[str]) -> dict[str, object]:
    """The figures of each load, by title; each is printed at once."""
    config = LocalConfig(
        model_path=resolve(model), model_name=Path(model).stem, worker_flags=worker_flags
    )
    results: dict[str, object] = {}
    async with local_pool(config, tell=click.echo) as pool, HeadraceClient(pool.address) as client:
        for load in loads(max_s):
            figures = await run_load(client, load)
            click.echo(f"\n{table(load.title, figures)}")
            results[load.title] = as_json(figures)
    return results


@click.command(context_settings={"show_default": True})
@click.option("--model", default="smollm2-135m-instruct", help="As `headrace serve` takes it.")
@click.option("--max-seconds", default=20.0, help="For each of the three loads.")
@click.option("--worker-flag", "worker_flags", multiple=True, help="For `python -m gpuworker`.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Figures as JSON.")
def main(
    model: str, max_seconds: float, worker_flags: tuple[str, ...], json_file: Path | None
) -> None:
    """Measure all services together on this machine."""
    os.environ.setdefault("HEADRACE_PARENT_DEATH", "1")
    try:
        results = asyncio.run(run(model, max_seconds, list(worker_flags)))
    except (LocalError, ModelFilesError) as error:
        raise click.ClickException(str(error)) from error
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
