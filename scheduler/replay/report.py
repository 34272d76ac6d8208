"""The output of `headrace replay`: a comparison with the core, or the effect of other settings."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from headrace.cli import explaining
from scheduler.replay.reader import UNPACK_ERRORS, read_traces
from scheduler.replay.replay import first_difference
from scheduler.replay.slow import Waits, history_of, waits_of
from scheduler.replay.trace import TraceRecord, trace_config
from scheduler.replay.what_if import RunOutcome, changed, recorded_outcome, try_settings

# Errors that well-formed but inconsistent records can raise: unknown names, mismatched lengths,
# blocks that are held twice, tables too large for memory.
_SENSELESS = (
    *(LookupError, ValueError, TypeError, AssertionError, ArithmeticError, AttributeError),
    *(RecursionError, MemoryError, msgspec.DecodeError, *UNPACK_ERRORS),
)


def compare(paths: Sequence[Path]) -> bool:
    """Replays every trace of the files; True if all match.

    Raises:
        ValueError: a file holds no trace.
    """
    num_traces = num_different = 0
    for path in paths:
        for name, trace in read_traces(path):
            num_traces += 1
            with _located(name, trace):
                num_different += not _matches(name, trace)
    if num_different:
        click.echo(f"{num_different} of {num_traces} differ")
        return False
    click.echo(f"{num_traces} of {num_traces} match")
    return True


def try_changes(paths: Sequence[Path], changes: Sequence[str]) -> None:
    """Runs every trace of the files under other settings (`name=value`).

    Raises:
        ValueError: a file holds no trace.
        click.BadParameter: there is no such setting, or the value is invalid.
    """
    for path in paths:
        for name, trace in read_traces(path):
            with _located(name, trace):
                _print_outcomes(name, trace, changes)


def show_waits(paths: Sequence[Path]) -> None:
    """Prints where the requests of each trace waited.

    Raises:
        ValueError: a file holds no trace.
    """
    for path in paths:
        for name, trace in read_traces(path):
            with _located(name, trace):
                _print_waits(name, waits_of(trace))


def explain(paths: Sequence[Path], request_id: str) -> None:
    """Prints the history of a request in each trace, as `headrace explain` does.

    Raises:
        ValueError: a file holds no trace, or no account of the request.
    """
    for path in paths:
        for name, trace in read_traces(path):
            with _located(name, trace):
                for line in explaining.lines(history_of(trace, request_id)):
                    click.echo(line)


@contextlib.contextmanager
def _located(name: str, trace: TraceRecord) -> Iterator[None]:
    """Turns an exception that an inconsistent trace raises into an error with its position."""
    try:
        yield
    except _SENSELESS as error:
        where = trace["steps"].where
        raise ValueError(f"{name}: {where}: {type(error).__name__}: {error}") from error


def _matches(name: str, trace: TraceRecord) -> bool:
    difference = first_difference(trace)
    if difference is None:
        return True
    if difference.is_on_purpose:
        click.echo(f"{name}: step {difference.step}: ends on purpose where vLLM 0.27.1 hangs")
        return True
    click.echo(f"{name}: step {difference.step}: {difference.field}")
    click.echo(f"  expected  {_short(difference.expected)}")
    click.echo(f"  got       {_short(difference.got)}")
    return False


def _short(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)


def _print_outcomes(name: str, trace: TraceRecord, changes: Sequence[str]) -> None:
    try:
        config = changed(trace_config(trace), changes)
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
    ("p99_steps_to_first_token", "p99 steps to 1st token"),
    ("num_missed", "missed deadlines"),
)
assert {field for field, _ in _ROWS} <= set(RunOutcome.__slots__), "a row shows a field"


def _print_waits(name: str, waits: Waits) -> None:
    num_requests, budget = len(waits.requests), max(1, sum(waits.tokens_by_use.values()))
    uses = ", ".join(f"{use} {n / budget:.0%}" for use, n in waits.tokens_by_use.items())
    waiting = ", ".join(f"{why.name.lower()} {n:.1f}" for why, n in waits.mean_waiting.items())
    median_s, p99_s = waits.first_token_s(50), waits.first_token_s(99)
    click.echo(f"{name}: {num_requests} requests, {waits.num_steps} steps, {waits.run_s:.1f} s")
    for title, value in (
        ("missed deadlines", f"{waits.num_missed} ({waits.num_missed / num_requests:.1%})"),
        ("preemptions", f"{waits.num_preemptions}"),
        ("time to first token", f"p50 {median_s:.2f} s, p99 {p99_s:.2f} s"),
        ("token budget", uses),
        ("waiting, mean", waiting or "none"),
    ):
        click.echo(f"  {title:<20}{value}")
    click.echo("  slowest to their first token, and the largest part of it:")
    for slow in waits.requests[:_NUM_SLOWEST]:
        cause = f"{slow.cause.name.lower()} {slow.cause_s:.2f} s"
        line = f"    {slow.request_id:<20}{slow.first_token_s:>8.2f} s  {cause:<20}"
        click.echo(f"{line}{slow.status.name.lower()}")


_NUM_SLOWEST = 10


def _number(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
