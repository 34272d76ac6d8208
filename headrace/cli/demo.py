"""`headrace demo`: starts all services, asks one question, prints figures, stops everything."""

import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import run
from headrace.cli.progress import ProgressSteps
from headrace.cli.serving import ended, make_config, model_options

if TYPE_CHECKING:
    from headrace.local import LocalConfig

_PROMPT = "In three sentences: why is the sky blue?"


@click.command()
@click.option("--prompt", default=_PROMPT, show_default=True, help="Question to ask.")
@click.option(
    "--max-tokens", type=int, default=128, show_default=True, help="Most tokens of the answer."
)
@model_options
def demo(prompt: str, max_tokens: int, **arguments: Any) -> None:
    """Start router, scheduler and gpuworker here, ask one question over gRPC, stop them.

    The model is fetched at the first run; later runs start in seconds. Nothing is left behind but
    the fetched model.
    """
    with ProgressSteps() as steps:
        config = make_config(arguments, steps)
        run(_demo(config, steps, prompt, max_tokens), otlp_endpoint=arguments["otlp_endpoint"])


async def _demo(config: "LocalConfig", steps: ProgressSteps, prompt: str, max_tokens: int) -> None:
    from headrace.cli.figures import Stopwatch
    from headrace.cli.printing import print_stream
    from headrace.client import ChatMessage, HeadraceClient, Sampling
    from headrace.local import LocalError, local_pool

    ours = asyncio.current_task()
    assert ours is not None, "inside the loop"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ours.cancel)
    try:
        async with local_pool(config, tell=steps.begin, log=steps.log) as pool:
            steps.done()
            click.echo(f"\n> {prompt}\n")
            sampling = Sampling(temperature=0.0, max_tokens=max_tokens)
            async with HeadraceClient(pool.address) as client:
                (model,) = await client.models()
                # A base model only continues text.
                asked = [ChatMessage("user", prompt)] if model.has_chat_template else prompt
                stopwatch = Stopwatch()
                answer = client.generate(asked, sampling=sampling)
                async with contextlib.aclosing(answer):
                    await print_stream(answer, stopwatch, [])
            click.echo(f"\n{stopwatch.figures()}")
            steps.begin("stopping")
    except LocalError as error:
        raise ended(error) from error
