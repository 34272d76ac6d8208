"""`headrace generate`: completes one prompt; reads from and writes to pipes."""

import contextlib
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import run
from headrace.cli.options import (
    connection_options,
    json_option,
    make_sampling,
    open_client,
    print_json,
    request_options,
    resume_option,
    sampling_options,
    take_request_options,
)

if TYPE_CHECKING:
    from headrace.client import Prompt


@click.command()
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Put PROMPT through the model's chat template.")
@click.option("--system", default="", help="System message; means --chat.")
@click.option("--token-ids", is_flag=True, help="PROMPT is token ids, separated by spaces.")
@click.option("-n", type=int, help="Independent completions of the prompt, 1 to 16.")
@click.option(
    "--logprobs", type=int, help="With --json: log probabilities, with this many alternatives."
)
@click.option("--prompt-logprobs", type=int, help="The same for the prompt's tokens.")
@click.option("--echo", is_flag=True, help="Print the prompt before the answer.")
@click.option("--include-stop", is_flag=True, help="Show the stop text that ended the answer.")
@click.option(
    "--request-id", default="", help="Id for resume, abort, status and explain.  [default: random]"
)
@click.option("--figures", is_flag=True, help="Print latency and throughput on stderr.")
@json_option
@request_options
@sampling_options
@resume_option
@connection_options
def generate(prompt: str | None, **arguments: Any) -> None:
    """Complete PROMPT and stream the text to stdout.

    PROMPT is used as it is; instruct models want --chat. With - (or no PROMPT in a pipe) the
    prompt is read from stdin, without a newline at its end. Ctrl-C or a closed pipe ends the
    request on the server too. When the connection is lost, the answer goes on by itself.

    \b
    Examples:
      headrace generate "The capital of France is" --max-tokens 8 --temperature 0
      headrace generate --chat "Why is the sky blue?" --figures
      echo hi | headrace generate -
      headrace generate - --system "Summarize." --json < notes.txt | jq -r .outputs[0].text
    """
    run(_generate(_read(prompt), arguments))


@click.command()
@click.argument("request_id")
@click.option(
    "--from-token",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="First generated token wanted: how many have been read.",
)
@json_option
@resume_option
@connection_options
def resume(request_id: str, from_token: int, as_json: bool, **arguments: Any) -> None:
    """Go on reading a request that runs, or that finished lately; from its beginning by default.

    Any router can be asked. A caller that reads the request now is cut off. Ctrl-C leaves the
    request as it is: `headrace abort` ends it.

    \b
    Examples:
      headrace resume my-request
      headrace resume my-request --from-token 120
    """
    run(_resume(request_id, from_token, arguments, as_json=as_json))


async def _resume(
    request_id: str, from_token: int, arguments: dict[str, Any], *, as_json: bool
) -> None:
    from headrace.cli.figures import Stopwatch
    from headrace.cli.printing import note, print_stream

    others: set[int] = set()

    async def first_completion(deltas: Any) -> Any:
        async for delta in deltas:
            if delta.index:
                others.add(delta.index)
            else:
                yield delta

    async with open_client(arguments) as client:
        deltas = client.resume(request_id, from_token)
        async with contextlib.aclosing(deltas):
            if as_json:
                await _print_whole(deltas, Stopwatch(), as_json=True)
            else:
                await print_stream(first_completion(deltas), Stopwatch(), [])
    if others:
        note(f"the first of {len(others) + 1} completions; --json prints all")


def _read(prompt: str | None) -> str:
    """The prompt's text, from stdin where that is meant."""
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("give a PROMPT, or - to read it from stdin")
    if prompt is not None and prompt != "-":
        return prompt
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise click.UsageError(f"stdin is not UTF-8 text (byte {error.start})") from error


def _prompt(text: str, *, chat: bool, system: str, token_ids: bool) -> "Prompt":
    from headrace.types import ChatMessage

    if token_ids:
        if chat or system:
            raise click.UsageError("--token-ids goes with neither --chat nor --system")
        try:
            return [int(part) for part in text.replace(",", " ").split()]
        except ValueError as error:
            raise click.BadParameter(
                "with --token-ids PROMPT is whole numbers, like '504 3575'",
                param_hint="PROMPT",
            ) from error
    if not (chat or system):
        return text
    before = [ChatMessage("system", system)] if system else []
    return [*before, ChatMessage("user", text)]


async def _generate(text: str, arguments: dict[str, Any]) -> None:
    from headrace.cli.figures import Stopwatch
    from headrace.cli.printing import print_stream

    names = ("chat", "system", "token_ids")
    prompt = _prompt(text, **{name: arguments.pop(name) for name in names})
    as_json, figures = arguments.pop("as_json"), arguments.pop("figures")
    options = take_request_options(arguments) | {
        "request_id": arguments.pop("request_id"),
        "echo": arguments.pop("echo"),
        "include_stop_str_in_output": arguments.pop("include_stop"),
    }
    async with open_client(arguments) as client:
        sampling = make_sampling(arguments)
        stopwatch = Stopwatch()
        deltas = client.generate(prompt, sampling=sampling, **options)
        async with contextlib.aclosing(deltas):
            if as_json or (sampling.n or 1) > 1:
                await _print_whole(deltas, stopwatch, as_json=as_json)
            else:
                await print_stream(deltas, stopwatch, [])
    if figures:
        click.echo(str(stopwatch.figures()), err=True)


async def _print_whole(deltas: Any, stopwatch: Any, *, as_json: bool) -> None:
    """Prints the whole answer at its end: several completions cannot share a stream of text."""
    from headrace.cli.printing import check, write
    from headrace.client import gather

    async def seen() -> Any:
        async for delta in deltas:
            stopwatch.see(delta)
            yield delta

    completion = await gather(seen())
    if as_json:
        print_json(asdict(completion) | {"figures": asdict(stopwatch.figures())})
    else:
        for number, output in enumerate(completion.outputs):
            write(f"--- {number + 1}\n{output.text}\n")
    for output in completion.outputs:
        check(output.finish_reason, completion.request_id)
