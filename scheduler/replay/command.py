"""`headrace replay`: runs recordings through the current core, or under other settings."""

import sys
from pathlib import Path

import click


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
@click.option("--slow", "is_slow", is_flag=True, help="Show where the slowest requests waited.")
@click.option("--explain", "request_id", metavar="REQUEST_ID", help="Show a request's history.")
def replay(
    traces: tuple[Path, ...], changes: tuple[str, ...], *, is_slow: bool, request_id: str | None
) -> None:
    """Replay recorded runs of the scheduler.

    Feeds each TRACE (a JSON trace or a file that `--record` wrote, also .gz and .xz, or a tar
    archive of traces) to the scheduling core and compares every step. Prints the first difference;
    exits with 0 only if all match. With an option, nothing is compared: --set tries the run under
    other settings, --slow and --explain tell what happened in the run.
    """
    # Imported here, so that `headrace --help` does not wait for numpy.
    from scheduler.replay import report

    try:
        if is_slow:
            report.show_waits(traces)
        elif request_id is not None:
            report.explain(traces, request_id)
        elif changes:
            report.try_changes(traces, changes)
        elif not report.compare(traces):
            sys.exit(1)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
