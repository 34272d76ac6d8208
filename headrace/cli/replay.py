"""`headrace replay`: recorded runs against today's scheduling core, or under other settings."""

import gzip
import json
import lzma
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from scheduler.core.replay import first_difference
from scheduler.core.trace import Record, assemble
from scheduler.core.what_if import Outcome, changed, recorded_outcome, settings, try_settings

_UNPACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".xz": lzma.decompress,
}


@click.command()
@click.argument(
    "traces",
    nargs=-1,
    required=True,
    metavar="TRACE...",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="SETTING=VALUE",
    help="Show what another setting would have done, e.g. policy=priority. Repeatable.",
)
def replay(traces: tuple[Path, ...], changes: tuple[str, ...]) -> None:
    """Replay recorded runs of the scheduler.

    Feeds each TRACE (a JSON trace or a file that `--record` wrote, also .gz and .xz, or a tar
    archive of traces) to the scheduling core and compares every step. Prints the first difference;
    exits with 0 only if all match. With --set, nothing is compared: the run is tried under other
    settings.
    """
    try:
        loaded = [named for path in traces for named in read_traces(path)]
        if changes:
            for name, trace in loaded:
                _print_outcomes(name, trace, changes)
            return
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    num_different = sum(not _matches(name, trace) for name, trace in loaded)
    if num_different:
        click.echo(f"{num_different} of {len(loaded)} differ")
        sys.exit(1)
    click.echo(f"{len(loaded)} of {len(loaded)} match")


def read_traces(path: Path) -> Iterator[tuple[str, Record]]:
    """The traces in a file, by name: one, or those of a tar archive.

    Raises:
        ValueError: it holds something else.
    """
    if not tarfile.is_tarfile(path):
        yield path.name, _trace(str(path), path.suffix, path.read_bytes())
        return
    with tarfile.open(path) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                name = Path(member.name)
                yield name.name, _trace(f"{path}: {member.name}", name.suffix, file.read())


def _trace(name: str, suffix: str, data: bytes) -> Record:
    """One JSON object, or a recording with one record a line."""
    try:
        text = _UNPACKERS.get(suffix, bytes)(data).decode()
    except (UnicodeDecodeError, OSError, EOFError, lzma.LZMAError) as error:
        raise ValueError(f"{name} is no trace: {error}") from error
    try:
        trace: Any = json.loads(text)
    except json.JSONDecodeError:
        lines = text.splitlines()
        if lines and not text.endswith("\n"):
            # The last line of a recording that is still written, or was cut off.
            lines.pop()
        try:
            trace = assemble([json.loads(line) for line in lines])
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{name} is no trace: {error!r}") from error
    if isinstance(trace, dict) and "config" in trace and "steps" not in trace:
        # A recording's head, alone: nothing has been asked of that scheduler since.
        raise ValueError(f"{name}: no step is recorded in it yet")
    if not isinstance(trace, dict) or not {"config", "steps", "requests"} <= trace.keys():
        raise ValueError(f"{name} is no trace: it lacks config, requests or steps")
    return trace


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


def _print_outcomes(name: str, trace: Record, changes: tuple[str, ...]) -> None:
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
