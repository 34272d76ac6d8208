"""`headrace models`, `pool` and `top`: the models, the workers and their load."""

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure, run
from headrace.cli.options import ask, connection_options, json_option, open_client, print_json

if TYPE_CHECKING:
    from headrace.types import PoolInfo, WorkerAudit

_CLEAR_SCREEN = "\x1b[H\x1b[2J"


@click.command()
@json_option
@connection_options
def models(as_json: bool, **arguments: Any) -> None:
    """Models that at least one worker serves.

    \b
    Example:
      headrace models --json | jq -r '.[].name'
    """
    found = ask(arguments, lambda client: client.models())
    if as_json:
        print_json(found)
        return
    rows = [["MODEL", "MAX TOKENS", "WORKERS"]]
    rows += [[m.name, str(m.max_model_len), str(m.num_ready_workers)] for m in found]
    click.echo(_table(rows))


@click.command()
@click.argument("what", type=click.Choice(["audit"]), required=False, metavar="[audit]")
@json_option
@connection_options
def pool(what: str | None, as_json: bool, **arguments: Any) -> None:
    """The workers and their load, as the router sees them now.

    With audit: how many KV blocks are held by requests, held by the prefix cache, and free, by the
    books of the schedulers, and whether the workers' own rows agree. When a block has no owner or a
    wrong one, the faults are printed and the exit code is 1.

    \b
    Examples:
      headrace pool
      headrace pool audit
    """
    if what == "audit":
        _audit(as_json, arguments)
        return
    found = ask(arguments, lambda client: client.pool())
    if as_json:
        print_json(found)
    else:
        click.echo(_pool_text(found))


def _audit(as_json: bool, arguments: dict[str, Any]) -> None:
    """Prints the audit; Failure when there are faults."""
    audits = ask(arguments, lambda client: client.audit())
    if as_json:
        print_json(audits)
    else:
        rows = [["WORKER", "SCHEDULER", "BLOCKS", "REQUESTS'", "CACHED", "FREE", "HOLDERS", "ROWS"]]
        rows += [_audit_row(audit) for audit in audits]
        click.echo(_table(rows))
        for audit in audits:
            for fault in audit.faults:
                click.echo(f"{audit.worker_id or audit.scheduler_id}: {fault}")
    wrong = sum(bool(audit.faults) for audit in audits)
    if wrong:
        raise Failure(f"the ledgers of {wrong} of {len(audits)} workers have faults")


def _audit_row(audit: "WorkerAudit") -> list[str]:
    blocks = (audit.num_kv_blocks, audit.num_owned_blocks, audit.num_cached_blocks)
    counts = (*blocks, audit.num_free_blocks, audit.num_requests)
    compared = "-" if audit.num_compared_rows is None else f"{audit.num_compared_rows} compared"
    return [audit.worker_id or "-", audit.scheduler_id, *map(str, counts), compared]


@click.command()
@click.option(
    "--interval-s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    help="Seconds between updates.",
)
@connection_options
def top(interval_s: float, **arguments: Any) -> None:
    """The workers and their load, shown again and again until Ctrl-C."""
    run(_watch(interval_s, arguments))


async def _watch(interval_s: float, arguments: dict[str, Any]) -> None:
    from headrace.connections import UnreachableError

    before = _CLEAR_SCREEN if sys.stdout.isatty() else ""
    async with open_client(arguments) as client:
        text = _pool_text(await client.pool())
        while True:
            click.echo(before + text)
            await asyncio.sleep(interval_s)
            try:
                text = _pool_text(await client.pool())
            except UnreachableError as error:
                # A router that has answered may come back.
                text = f"{error.message}; trying again"


def _pool_text(found: "PoolInfo") -> str:
    rows = [["WORKER", "MODEL", "STATE", "ROLE", "DEVICE", "RUNNING", "WAITING", "KV USED"]]
    for w in found.workers:
        used = 1 - w.num_free_kv_blocks / w.num_kv_blocks if w.num_kv_blocks else 0.0
        running = f"{w.num_running}/{w.max_num_seqs}"
        row = [w.worker_id, w.model, w.state, w.role, w.device, running, str(w.num_waiting)]
        rows.append([*row, f"{used:.0%}"])
    return (
        f"{_table(rows)}\n"
        f"in the router: {found.num_queued} waiting, {found.num_in_flight} given to schedulers, "
        f"{found.num_paused} paused"
    )


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
