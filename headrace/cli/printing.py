"""Answers on stdout, as they come."""

import sys
from collections.abc import AsyncIterator

import click

from headrace.cli.exits import Failure
from headrace.cli.figures import Stopwatch
from headrace.types import Delta
from headrace.vocabulary import FinishReason

_FAILED = {
    FinishReason.ERROR: "the request failed inside the server; `headrace status {id}` says why",
    FinishReason.ABORTED: "the request was aborted by an Abort call",
    FinishReason.DEADLINE: "the deadline passed before the answer was complete",
}


def write(text: str) -> None:
    """Writes text to stdout at once; characters that stdout cannot show become '?'."""
    if not text:
        return
    encoding = sys.stdout.encoding or "utf-8"
    # A terminal that cannot show a character must not end the answer.
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def note(text: str) -> None:
    """A line on stderr, dim on a terminal, where it is apart from the answer."""
    is_beside_answer = sys.stderr.isatty() and sys.stdout.isatty()
    before = "\n" if is_beside_answer else ""
    click.echo(before + click.style(f"({text})", dim=True), err=True)


async def print_stream(
    deltas: AsyncIterator[Delta], stopwatch: Stopwatch, answer: list[str]
) -> None:
    """Prints the first completion as it comes, and a newline unless the text ends in one.

    Appends each piece to `answer`, so that the caller has the part of an interrupted answer. Raises
    Failure when the request was aborted, failed, or passed its deadline.
    """
    async for delta in deltas:
        stopwatch.see(delta)
        write(delta.text)
        answer.append(delta.text)
        check(delta.finish_reason, delta.request_id)
    if not "".join(answer).endswith("\n"):
        write("\n")


def check(reason: FinishReason | None, request_id: str) -> None:
    """Raises Failure if the request ended by an error, an abort or its deadline."""
    if reason in _FAILED:
        if sys.stdout.isatty():
            click.echo()
        raise Failure(_FAILED[reason].format(id=request_id))
