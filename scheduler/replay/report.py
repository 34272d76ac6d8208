"""What `headrace replay` prints: a comparison with the core, or what other settings would do."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from scheduler.replay.reader import read_traces
from scheduler.replay.replay import first_difference
from scheduler.replay.trace import Record
from scheduler.replay.what_if import Outcome, changed, recorded_outcome, settings, try_settings


def compare(paths: Sequence[Path]) -> bool:
    """Replay every trace of these files; whether all match.

    Raises:
        ValueError: a file holds no trace.
    """
    loaded = [named for path in paths for named in read_traces(path)]
    num_different = sum(not _matches(name, trace) for name, trace in loaded)
    if num_different:
        click.echo(f"{num_different} of {len(loaded)} differ")
        return False
    click.echo(f"{len(loaded)} of {len(loaded)} match")
    return True


def try_changes(paths: Sequence[Path], changes: Sequence[str]) -> None:
    """Run every trace of these files under other settings (`name=value`).

    Raises:
        ValueError: a file holds no trace.
        click.BadParameter: no such setting, or no such value of it.
    """
    for path in paths:
        for name, trace in read_traces(path):
            _print_outcomes(name, trace, changes)


def _matches(name: str, trace: Record) -> bool:
    difference = first_difference(trace)
    if difference is None:
        return True
    if difference.is_on_purpose:
        click.echo(f"{name}: step {difference.step}: ends on purpose where the reference hangs")
        return True
    click.echo(f"{name}: step {difference.step}: {difference.field}")
    click.echo(f"  expected  {_short(difference.expected)}")
    click.echo(f"  got       {_short(difference.got)}")
    return False


def _short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _print_outcomes(name: str, trace: Record, changes: Sequence[str]) -> None:
    try:
        config = changed(settings(trace), changes)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--set") from error
    tried = try_settings(trace, config)
    recorded = recorded_outcome(trace)
    click.echo(f"{name} with {', '.join(changes)}")
    click.echo(f"  {'':24}{'recorded':>12}{'changed':>12}")
    for field, title in _ROWS:
        before, after = getattr(recorded, field), getattr(tried, field)
        click.echo(f"  {title:24}{_number(before):>12}{_number(after):>12}")


_ROWS = (
    ("num_steps", "steps"),
    ("num_finished", "requests finished"),
    ("num_output_tokens", "output tokens"),
    ("num_preemptions", "preemptions"),
    ("num_recomputed_tokens", "recomputed tokens"),
    ("num_cached_tokens", "cached tokens"),
    ("mean_steps_waited", "mean steps waited"),
    ("max_steps_waited", "most steps waited"),
)
assert {field for field, _ in _ROWS} <= set(Outcome.__slots__), "a row shows a field of Outcome"


def _number(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
