"""`headrace chat`: a conversation in the terminal."""

import asyncio
import contextlib
import sys
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure, run
from headrace.cli.options import (
    connection_options,
    make_sampling,
    open_client,
    request_options,
    resume_option,
    sampling_options,
    take_request_options,
)

if TYPE_CHECKING:
    from headrace.client import HeadraceClient
    from headrace.types import ChatMessage, Sampling


@click.command()
@click.argument("message", required=False)
@click.option("--system", default="", help="System message.")
@click.option("--figures", is_flag=True, help="Print latency and throughput after each answer.")
@request_options
@sampling_options
@resume_option
@connection_options
def chat(message: str | None, system: str, figures: bool, **arguments: Any) -> None:
    """Talk to a model; the conversation is kept until you leave.

    MESSAGE, if given, is the first thing said. Ctrl-C ends an answer (on the server too) and the
    conversation goes on; Ctrl-D leaves. /clear forgets what was said. In a pipe, each line is a
    turn.

    \b
    Examples:
      headrace chat --temperature 0.2
      headrace chat "Why is the sky blue?"
      headrace chat --system "Answer in one sentence."
      printf 'Hello\\nWho are you?\\n' | headrace chat
    """
    from headrace.types import ChatMessage

    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 line editing and history in input()
    options = take_request_options(arguments)
    # The event loop runs only while an answer is awaited: then Ctrl-C cancels the loop's task, and
    # at the prompt Ctrl-C raises KeyboardInterrupt in `input`.
    with asyncio.Runner() as runner:
        client = runner.run(_open(arguments))
        conversation = _Conversation(client, make_sampling(arguments), options, figures=figures)
        if system:
            conversation.messages.append(ChatMessage("system", system))
        try:
            conversation.talk(runner, message)
        finally:
            runner.run(client.aclose())


async def _open(arguments: dict[str, Any]) -> "HeadraceClient":
    return open_client(arguments)


class _Conversation:
    """The messages so far, and the settings of the next request."""

    def __init__(
        self,
        client: "HeadraceClient",
        sampling: "Sampling",
        options: dict[str, Any],
        *,
        figures: bool,
    ) -> None:
        self.messages: list[ChatMessage] = []
        self._client = client
        self._sampling = sampling
        self._options = options
        self._figures = figures
        self._is_interactive = sys.stdin.isatty()

    def talk(self, runner: asyncio.Runner, first: str | None = None) -> None:
        """Runs turns until Ctrl-D; a failed turn ends the command only if stdin is a pipe."""
        num_system = len(self.messages)
        line = self._read() if first is None else first
        while line is not None:
            if line.strip() == "/clear":
                del self.messages[num_system:]
            elif line.strip():
                self._turn(runner, line)
            line = self._read()

    def _read(self) -> str | None:
        """The next line, None at the end."""
        while True:
            try:
                return input("> " if self._is_interactive else "")
            except EOFError:
                if self._is_interactive:
                    click.echo()
                return None
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                click.echo("\n(Ctrl-D leaves)")

    def _turn(self, runner: asyncio.Runner, line: str) -> None:
        """Asks a question and prints the answer; keeps the beginning of an interrupted answer."""
        from headrace.types import ChatMessage

        self.messages.append(ChatMessage("user", line))
        answer: list[str] = []
        try:
            run(self._answer(answer), runner.run)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            click.echo("\n(stopped)")
        except Failure as failure:
            if not self._is_interactive:
                raise
            failure.show()
        text = "".join(answer)
        if text:
            self.messages.append(ChatMessage("assistant", text))
        else:
            # A question without an answer would be sent again with the next question.
            self.messages.pop()

    async def _answer(self, answer: list[str]) -> None:
        from headrace.cli.figures import Stopwatch
        from headrace.cli.printing import print_stream

        stopwatch = Stopwatch()
        deltas = self._client.generate(self.messages, sampling=self._sampling, **self._options)
        async with contextlib.aclosing(deltas):
            await print_stream(deltas, stopwatch, answer)
        if self._figures:
            click.echo(str(stopwatch.figures()), err=True)
