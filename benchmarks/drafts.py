"""`make bench-drafts`: the speed-up by speculation on this machine, with a small real model.

The same prompts run one by one through a pool without drafts and through a pool with drafts; the
greedy answers must be equal. A repetitive prompt shows the best case of prompt lookup, an ordinary
prompt its cost or gain otherwise.
"""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from headrace.cli.figures import Figures, Stopwatch
from headrace.client import HeadraceClient, Sampling
from headrace.local import LocalConfig, LocalError, local_pool
from headrace.service.model_files import ModelFilesError, resolve

PROMPTS = {
    "repetitive": "The wheel turns, the river runs, and the stones grind the miller's rye. " * 6,
    "free": "Once upon a time, in a mill by the river, there lived a miller who",
}
# Runs per prompt; the fastest counts, because other load on the machine only adds time.
_NUM_RUNS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt's text, and the fastest run's figures."""

    text: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt, run without and with drafts."""

    plain: Answer
    drafted: Answer

    @property
    def speed_up(self) -> float:
        """Ratio of time per token without to with drafts; NaN for an answer of one token."""
        plain, drafted = self.plain.figures.tpot_s, self.drafted.figures.tpot_s
        return plain / drafted if plain and drafted else float("nan")

    @property
    def acceptance(self) -> float:
        """Accepted drafts / verified drafts; NaN without drafts."""
        figures = self.drafted.figures
        total = figures.num_draft_tokens
        return figures.num_accepted_draft_tokens / total if total else float("nan")


async def compare(
    model: str, num_spec_tokens: int, max_tokens: int, num_runs: int = _NUM_RUNS
) -> dict[str, Comparison]:
    """Runs all prompts through both pools, one pool after the other.

    Raises:
        LocalError, ModelFilesError: the model or a service is not available.
    """
    plain = await _answers(model, 0, max_tokens, num_runs)
    drafted = await _answers(model, num_spec_tokens, max_tokens, num_runs)
    return {name: Comparison(plain[name], drafted[name]) for name in PROMPTS}


async def _answers(
    model: str, num_spec_tokens: int, max_tokens: int, num_runs: int
) -> dict[str, Answer]:
    config = LocalConfig(
        model_path=resolve(model),
        model_name=Path(model).stem,
        worker_flags=["--num-spec-tokens", str(num_spec_tokens)],
    )
    async with local_pool(config, tell=click.echo) as pool, HeadraceClient(pool.address) as client:
        return {
            name: await _answer(client, prompt, max_tokens, num_runs)
            for name, prompt in PROMPTS.items()
        }


async def _answer(client: HeadraceClient, prompt: str, max_tokens: int, num_runs: int) -> Answer:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    text, runs = "", []
    for _ in range(num_runs):
        stopwatch, pieces = Stopwatch(), []
        async for delta in client.generate(prompt, sampling=sampling):
            stopwatch.see(delta)
            pieces.append(delta.text)
        text = "".join(pieces)
        runs.append(stopwatch.figures())
    return Answer(text, min(runs, key=lambda figures: figures.e2e_s))


def table(comparisons: Mapping[str, Comparison]) -> str:
    """Formats the comparisons for a person."""
    head = f"{'prompt':<12}{'tokens':>8}{'TPOT ms':>10}{'drafted':>10}{'speed-up':>10}"
    lines = [f"{head}{'drafts':>9}{'right':>8}{'same text':>11}"]
    for name, comparison in comparisons.items():
        plain, drafted = comparison.plain.figures, comparison.drafted.figures
        is_same = comparison.plain.text == comparison.drafted.text
        lines.append(
            f"{name:<12}{plain.num_tokens:>8}{1000 * (plain.tpot_s or 0):>10.1f}"
            f"{1000 * (drafted.tpot_s or 0):>10.1f}{comparison.speed_up:>9.2f}x"
            f"{drafted.num_draft_tokens:>9}{comparison.acceptance:>8.0%}"
            f"{'yes' if is_same else 'NO':>11}"
        )
    return "\n".join(lines)


@click.command(context_settings={"show_default": True})
@click.option("--model", default="smollm2-135m-instruct", help="As `headrace serve` takes it.")
@click.option("--num-spec-tokens", default=3, help="Drafts for a request and step, at most.")
@click.option("--max-tokens", default=128, help="Of each answer.")
def main(model: str, num_spec_tokens: int, max_tokens: int) -> None:
    """Measure drafts by prompt lookup on this machine."""
    os.environ.setdefault("HEADRACE_PARENT_DEATH", "1")
    try:
        comparisons = asyncio.run(compare(model, num_spec_tokens, max_tokens))
    except (LocalError, ModelFilesError) as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"\n{table(comparisons)}")
    if any(c.plain.text != c.drafted.text for c in comparisons.values()):
        raise click.ClickException("drafts changed a greedy answer")


if __name__ == "__main__":
    main()
