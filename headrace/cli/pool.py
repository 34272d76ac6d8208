"""`headrace models`, `pool` and `top`: the models, the workers, their load, and changes to them."""

import asyncio
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure
from headrace.cli.options import ask, connection_options, json_option, print_json

if TYPE_CHECKING:
    from headrace.client import HeadraceClient
    from headrace.types import PoolInfo, WorkerAudit, WorkerStatus

# Between two looks at a worker that is being drained.
_LOOK_S = 0.5


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


class _PoolGroup(click.Group):
    """A group whose bare call lists; the subcommand may stand behind its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = next((i for i, arg in enumerate(args) if arg in self.commands), None)
        if at is not None:
            args = [args[at], *args[:at], *args[at + 1 :]]
        elif "--help" not in args and (not args or args[0].startswith("-")):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_PoolGroup)
def pool() -> None:
    """The workers: list, drain, give roles, audit. Without a command: list.

    \b
    Examples:
      headrace pool
      headrace pool drain worker-0 --wait && kubectl delete pod worker-0
      headrace pool undrain worker-0
      headrace pool set-role worker-0 decode
      headrace pool audit
    """


@pool.command("list")
@json_option
@connection_options
def list_workers(as_json: bool, **arguments: Any) -> None:
    """The workers and their load, as the router sees them now."""
    found = ask(arguments, lambda client: client.pool())
    if as_json:
        print_json(found)
    else:
        click.echo(pool_text(found))


@pool.command()
@json_option
@connection_options
def audit(as_json: bool, **arguments: Any) -> None:
    """Who holds the KV blocks of each worker.

    How many KV blocks are held by requests, held by the prefix cache, and free, by the books of the
    schedulers, and whether the workers' own rows agree. When a block has no owner or a wrong one,
    the faults are printed and the exit code is 1.
    """
    audits = ask(arguments, lambda client: client.audit())
    if as_json:
        print_json(audits)
    else:
        rows = [["WORKER", "SCHEDULER", "BLOCKS", "REQUESTS'", "CACHED", "FREE", "HOLDERS", "ROWS"]]
        rows += [_audit_row(found) for found in audits]
        click.echo(_table(rows))
        for found in audits:
            for fault in found.faults:
                click.echo(f"{found.worker_id or found.scheduler_id}: {fault}")
    wrong = sum(bool(found.faults) for found in audits)
    if wrong:
        raise Failure(f"the ledgers of {wrong} of {len(audits)} workers have faults")


@pool.command()
@click.argument("worker")
@click.option("--wait", is_flag=True, help="Wait until the worker has no request left.")
@json_option
@connection_options
def drain(worker: str, wait: bool, as_json: bool, **arguments: Any) -> None:
    """Let WORKER finish what it has, and give it nothing new.

    The worker stays connected, in state draining, until `headrace pool undrain WORKER`, or until
    the worker or its scheduler is started again: then the worker gets requests as before. Paused
    requests, which hold no KV blocks, are not waited for.

    \b
    Examples:
      headrace pool drain worker-0
      timeout 600 headrace pool drain worker-0 --wait && kubectl delete pod worker-0
    """

    async def work(client: "HeadraceClient") -> "WorkerStatus":
        drained = await client.drain(worker)
        return await _emptied(client, drained) if wait else drained

    _show(ask(arguments, work), as_json)


@pool.command()
@click.argument("worker")
@json_option
@connection_options
def undrain(worker: str, as_json: bool, **arguments: Any) -> None:
    """Give a drained WORKER requests again."""
    _show(ask(arguments, lambda client: client.undrain(worker)), as_json)


@pool.command("set-role")
@click.argument("worker")
@click.argument("role", type=click.Choice(["mixed", "prefill", "decode"]))
@json_option
@connection_options
def set_role(worker: str, role: str, as_json: bool, **arguments: Any) -> None:
    """Make WORKER mixed, prefill or decode.

    Routers send prompts to a decode worker only when there is no other. The role holds until the
    scheduler is started again, also for later processes of the worker.

    \b
    Example:
      headrace pool set-role worker-1 decode
    """
    _show(ask(arguments, lambda client: client.set_role(worker, role)), as_json)


def _show(worker: "WorkerStatus", as_json: bool) -> None:
    if as_json:
        print_json(worker)
    else:
        counts = f"{worker.num_running} running, {worker.num_waiting} waiting"
        click.echo(f"{worker.worker_id} is {worker.state}, with role {worker.role}: {counts}")


async def _emptied(client: "HeadraceClient", worker: "WorkerStatus") -> "WorkerStatus":
    """The worker when it has no request left; Failure if it is used again instead."""
    was_seen = False
    while worker.num_running or worker.num_waiting:
        await asyncio.sleep(_LOOK_S)
        workers = {found.worker_id: found for found in (await client.pool()).workers}
        if (found := workers.get(worker.worker_id)) is None or found.state == "lost":
            raise Failure(f"{worker.worker_id} is lost: its requests go on elsewhere")
        # A router hears of a change a moment later.
        was_seen = was_seen or found.state == "draining"
        if was_seen:
            worker = found
        if was_seen and found.state != "draining":
            raise Failure(f"{worker.worker_id} is {found.state} again, and not drained")
    return worker


def _audit_row(audit: "WorkerAudit") -> list[str]:
    blocks = (audit.num_kv_blocks, audit.num_owned_blocks, audit.num_cached_blocks)
    counts = (*blocks, audit.num_free_blocks, audit.num_requests)
    compared = "-" if audit.num_compared_rows is None else f"{audit.num_compared_rows} compared"
    return [audit.worker_id or "-", audit.scheduler_id, *map(str, counts), compared]


def pool_text(found: "PoolInfo") -> str:
    """The workers as a table, and what the router has."""
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
