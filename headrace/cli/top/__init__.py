"""`headrace top`: the queue, the workers and their steps, shown until Ctrl-C.

On a terminal a live view, which the package textual draws; elsewhere text, again and again.
"""

import asyncio
import os
import sys
from typing import Any

import click

from headrace.cli.exits import run
from headrace.cli.options import connection_options, open_client
from headrace.cli.pool import pool_text


@click.command()
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@click.option("--plain", is_flag=True, help="Print text again and again, also on a terminal.")
@connection_options
def top(interval_s: float, plain: bool, **arguments: Any) -> None:
    """Show the queue, the workers and what fills their steps, until q or Ctrl-C.

    \b
    Keys: s sorts the workers, r reverses; tab goes to the queue, v shows its requests or
    tenants; enter looks into a worker or a request; e asks for a request by its id; p stops the
    picture; escape goes back.
    """
    has_screen = sys.stdin.isatty() and sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    if plain or not has_screen:
        run(_print_again_and_again(interval_s, arguments))
        return
    try:
        from headrace.cli.top.app import watch
    except ModuleNotFoundError as error:
        if error.name != "textual":
            raise
        click.echo("no live view without textual: pip install 'headrace[top]'", err=True)
        run(_print_again_and_again(interval_s, arguments))
        return
    run(watch(lambda: open_client(arguments), interval_s))


async def _print_again_and_again(interval_s: float, arguments: dict[str, Any]) -> None:
    from headrace.connections import UnreachableError

    async with open_client(arguments) as client:
        text = pool_text(await client.pool())
        while True:
            click.echo(text)
            await asyncio.sleep(interval_s)
            try:
                text = pool_text(await client.pool())
            except UnreachableError as error:
                # A router that has answered may come back.
                text = f"{error.message}; trying again"
