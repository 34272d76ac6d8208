"""`headrace serve`: everything on this machine, in the foreground."""

import asyncio
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure
from headrace.cli.progress import Steps
from headrace.cli.serving import ended, flags, make_config, model_options

if TYPE_CHECKING:
    from headrace.client import ChannelConfig
    from headrace.local import LocalConfig


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; 0.0.0.0 lets other machines in: then use TLS and a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8700,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@model_options
@click.option(
    "--store-url",
    help='Status store: redis://, rediss:// or unix://; "" for none.  [default: an embedded one]',
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep the embedded store's records here, over restarts.",
)
@click.option(
    "--drain-timeout-s",
    type=float,
    default=5.0,
    show_default=True,
    help="Time for running requests to finish after Ctrl-C.",
)
@click.option("--tls-cert-file", default="", metavar="PEM", help="Certificate; turns TLS on.")
@click.option("--tls-key-file", default="", metavar="PEM", help="Its private key.")
@click.option(
    "--tls-client-ca-file",
    default="",
    metavar="PEM",
    help="Authorities of callers' certificates (mTLS).",
)
@click.option(
    "--auth-token-file",
    default="",
    metavar="FILE",
    help="File with a token that callers must send.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True),
    help="TOML file for all services: [router], [scheduler], [gpuworker].",
)
def serve(
    host: str,
    port: int,
    store_url: str | None,
    data_dir: Path | None,
    drain_timeout_s: float,
    config_file: Path | None,
    **arguments: Any,
) -> None:  # fmt: skip
    """Serve a model on this machine until Ctrl-C: a router, a scheduler and gpuworkers.

    Without options: the small built-in model (fetched once), on 127.0.0.1:8700, with an embedded
    status store, as fast as this machine can.

    \b
    Examples:
      headrace serve
      headrace serve --model ./Llama-3.2-1B-Instruct --port 9000
      headrace serve --num-kv-blocks 64 --log-level info
    """
    serving = {
        name: arguments.pop(name)
        for name in ("tls_cert_file", "tls_key_file", "tls_client_ca_file", "auth_token_file")
    }
    _check_free(host, port)
    with Steps() as steps:
        config = make_config(
            arguments,
            steps,
            listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            store_url=store_url,
            data_dir=data_dir,
            drain_timeout_s=drain_timeout_s,
            shared_flags=flags({"config": config_file}),
            router_flags=flags(serving),
            channel=_channel(serving),
        )
        asyncio.run(_serve(config, steps))


def _check_free(host: str, port: int) -> None:
    """Says at once what else the router would say when the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise Failure(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from error


def _channel(serving: dict[str, str]) -> "ChannelConfig | None":
    """How the router can be asked whether it is ready; None when only strangers could."""
    from headrace.client import ChannelConfig

    if serving["tls_cert_file"]:
        return None
    return ChannelConfig(auth_token_file=serving["auth_token_file"])


async def _serve(config: "LocalConfig", steps: Steps) -> None:
    from headrace.local import LocalError, local_pool

    ours = asyncio.current_task()
    assert ours is not None, "inside the loop"
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ours.cancel)
    try:
        async with local_pool(config, tell=steps.begin, log=steps.log) as pool:
            steps.done()
            click.echo(_welcome(config.model_name, pool.address))
            try:
                raise ended(await pool.wait_failed())
            finally:
                steps.begin("stopping")
    except LocalError as error:
        raise ended(error) from error
    except asyncio.CancelledError:
        # Asked to stop: everything is stopped now, and that is success.
        steps.done()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _welcome(model: str, address: str) -> str:
    server = "" if address == "127.0.0.1:8700" else f" --server {address}"
    return (
        f"Serving {model} at {address} (gRPC, headrace.v1.Inference). In another terminal:\n"
        f"  headrace chat{server}\n"
        f'  headrace generate{server} --chat "Why is the sky blue?"\n'
        f"  headrace top{server}\n"
        "Ctrl-C stops it."
    )
