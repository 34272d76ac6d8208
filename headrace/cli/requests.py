"""`headrace abort`, `status` and `explain`: requests by their id."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure, run
from headrace.cli.options import connection_options, json_option, open_client, print_json

if TYPE_CHECKING:
    from headrace.types import Explanation, RequestRecord


@click.command()
@click.argument("request_ids", nargs=-1, required=True, metavar="REQUEST_ID...")
@json_option
@connection_options
def abort(request_ids: tuple[str, ...], as_json: bool, **arguments: Any) -> None:
    """End requests; a request that has already ended is no error.

    \b
    Example:
      headrace abort 5f0c1f0e9d5b4a7e8f6f3f0f8a1c2b3d
    """
    from headrace.types import AbortResult

    async def work() -> Any:
        async with open_client(arguments) as client:
            return await client.abort(request_ids)

    outcomes = run(work())
    if as_json:
        print_json(outcomes)
    else:
        for outcome in outcomes:
            click.echo(f"{outcome.request_id}  {outcome.result}")
    unknown = sum(outcome.result is AbortResult.NOT_FOUND for outcome in outcomes)
    if unknown:
        raise Failure(f"{unknown} of {len(outcomes)} requests are not known to this router")


@click.command()
@click.argument("request_id")
@json_option
@connection_options
def status(request_id: str, as_json: bool, **arguments: Any) -> None:
    """Where a request stands: waiting, running, or how it ended.

    \b
    Example:
      headrace status my-request --json | jq -r .state
    """

    async def work() -> "RequestRecord":
        async with open_client(arguments) as client:
            return await client.status(request_id)

    record = run(work())
    if as_json:
        print_json(record)
        return
    _print_rows(
        ("request", record.request_id),
        ("state", record.state + (f" ({record.detail})" if record.detail else "")),
        ("model", record.model),
        ("tenant", record.tenant or "(default)"),
        ("tokens", f"{record.prompt_tokens} prompt, {record.completion_tokens} generated"),
        ("created", _when(record.create_time_unix_s)),
        ("changed", _when(record.update_time_unix_s)),
        ("epoch", str(record.epoch)),
    )


@click.command()
@click.argument("request_id")
@json_option
@connection_options
def explain(request_id: str, as_json: bool, **arguments: Any) -> None:
    """Why a request, running or lately finished, waited or lost its place: step by step.

    \b
    Example:
      headrace explain my-request
    """

    async def work() -> "Explanation":
        async with open_client(arguments) as client:
            return await client.explain(request_id)

    explanation = run(work())
    if as_json:
        print_json(explanation)
        return
    for event in explanation.events:
        steps = f"{event.first_step}"
        if event.last_step != event.first_step:
            steps += f"-{event.last_step}"
        place = "" if event.queue_position is None else f"  place {event.queue_position + 1}"
        line = f"step {steps:<12} {event.kind:<10}{place}  {event.detail}"
        click.echo(line.rstrip())
    waited = ", ".join(f"{n} for {cause}" for cause, n in explanation.steps_waited_by_cause.items())
    _print_rows(
        ("steps waited", waited or "none"),
        ("preemptions", str(explanation.num_preemptions)),
        ("recomputed", f"{explanation.recomputed_tokens} tokens"),
        ("from cache", f"{explanation.cached_tokens} tokens"),
    )


def _print_rows(*rows: tuple[str, str]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value}")


def _when(unix_s: float) -> str:
    """Local time, to the millisecond."""
    time = datetime.fromtimestamp(unix_s, UTC).astimezone()
    return time.isoformat(sep=" ", timespec="milliseconds")
