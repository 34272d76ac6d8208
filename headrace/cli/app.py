"""The `headrace` command: its subcommands, and the exit codes of interrupts and closed pipes.

A subcommand's module is imported when the subcommand is used, so that --help is quick.
"""

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import INTERRUPTED, PIPE_CLOSED

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# gRPC's own log lines would mix with an answer; errors are raised as exceptions anyway.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Name -> its line in `headrace --help`; the module is headrace.cli.<name> unless in _MODULES.
# Services add commands as entry points of the group _ENTRY_POINTS.
_COMMANDS = {
    "demo": "Start all services, ask a question, stop.",
    "serve": "Serve a model on this machine.",
    "generate": "Complete a prompt, streaming the text.",
    "chat": "Talk to a model.",
    "resume": "Go on reading a request.",
    "abort": "End requests.",
    "status": "Show the state of a request.",
    "explain": "Show how a request was scheduled, and why.",
    "models": "List the models that are served.",
    "pool": "List the workers, drain them, give them roles, audit them.",
    "pool-controller": "Scale pools of workers on Kubernetes by their load.",
    "top": "Watch the queue, the workers and their steps.",
    "doctor": "Check a deployment, and say what to do.",
    "keys": "Make, list and revoke API keys.",
}
_MODULES = {
    "resume": "generate",
    "abort": "requests",
    "status": "requests",
    "explain": "requests",
    "models": "pool",
    "pool-controller": "pool_controller",
}
_ENTRY_POINTS = "headrace.commands"


class _App(click.Group):
    """A group whose commands are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 click's signature
        return [*_COMMANDS, *_entry_points()]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in _COMMANDS:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if near and near[0] != args[0]:
                ctx.fail(f"no such command {args[0]!r}; did you mean {near[0]!r}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name in _COMMANDS:
            module = importlib.import_module(f"headrace.cli.{_MODULES.get(cmd_name, cmd_name)}")
            command = getattr(module, cmd_name.replace("-", "_"))
        elif (entry_point := _entry_points().get(cmd_name)) is not None:
            command = entry_point.load()
        else:
            return None
        assert isinstance(command, click.Command), f"{cmd_name} is a click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        loaded = {name: entry_point.load() for name, entry_point in _entry_points().items()}
        added = {name: command.get_short_help_str() for name, command in loaded.items()}
        with formatter.section("Commands"):
            formatter.write_dl(list((_COMMANDS | added).items()))

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _our_exits():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _our_exits():
            return super().invoke(ctx)


def _entry_points() -> "dict[str, EntryPoint]":
    """Commands that services add, by name; --help imports their modules, which must be quick."""
    from importlib import metadata

    return {point.name: point for point in metadata.entry_points(group=_ENTRY_POINTS)}


@contextlib.contextmanager
def _our_exits() -> Iterator[None]:
    """Ends the process without a traceback at Ctrl-C and when stdout's reader is gone."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        if sys.stdout.isatty():
            # The shell's prompt begins a new line.
            click.echo()
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # Python would report the closed pipe again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(PIPE_CLOSED)


def _show_version(ctx: click.Context, _: click.Parameter, is_wanted: bool) -> None:
    if not is_wanted:
        return
    from importlib import metadata

    try:
        click.echo(f"headrace {metadata.version('headrace')}")
    except metadata.PackageNotFoundError:
        click.echo("headrace, not installed: run from its source folder")
    ctx.exit()


@click.group(cls=_App, context_settings={"max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Headrace serves large language models over gRPC on a pool of workers.

    \b
    Start here:
      headrace demo                         start all services, ask a question, stop
      headrace serve                        serve the small model until Ctrl-C
      headrace chat                         talk to the model, from another terminal
      echo "Once upon" | headrace generate - --max-tokens 40

    Commands that talk to a server find it by --server or HEADRACE_SERVER (127.0.0.1:8700).

    \b
    Exit codes: 0 done; 1 the request failed or was refused; 2 wrong usage;
    3 no server reached; 130 interrupted by Ctrl-C; 141 the output's reader left.
    """
