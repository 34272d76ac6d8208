"""`headrace serve`: everything on this machine, in the foreground."""

import asyncio
import os
import re
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure
from headrace.cli.progress import ProgressSteps
from headrace.cli.serving import ended, flags, make_config, model_options

if TYPE_CHECKING:
    from headrace.client import ChannelConfig
    from headrace.local import LocalConfig, LocalPool
    from headrace.service.serving import ServingConfig

_DRAIN_TIMEOUT_S = 5.0
_SERVING = (
    *("tls_cert_file", "tls_key_file", "tls_client_ca_file", "auth_token_file", "api_keys_file"),
)


@click.command()
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on. With 0.0.0.0 other machines can connect: use TLS and a token.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8700,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65535),
    help="Port of /metrics, /healthz and /readyz over HTTP, on 127.0.0.1; 0 takes a free one."
    "  [default: the one after --port]",
)
@click.option("--no-admin", is_flag=True, help="Open no admin port.")
@model_options
@click.option(
    "--store-url",
    help="Status store, as docs/operations.md lists the URLs: redis://, redis+sentinel://,"
    ' redis+cluster://, unix://; "" for none.  [default: an embedded one]',
)
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the embedded store.  [default: one for this model and port in"
    " ~/.local/state/headrace; with --port 0, none]",
)
@click.option(
    "--ephemeral", is_flag=True, help="Keep nothing of the embedded store over a restart."
)
@click.option(
    "--drain-timeout-s",
    type=float,
    help="Time for running requests to finish after Ctrl-C.  [default: 5]",
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
    "--api-keys-file",
    default="",
    metavar="TOML",
    help="File with hashes of the keys that callers may send, as `headrace keys` makes it.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True),
    help="TOML file with settings of all services, as docs/settings.md lists them.",
)
def serve(
    host: str,
    port: int,
    admin_port: int | None,
    no_admin: bool,
    drain_timeout_s: float | None,
    config_file: Path | None,
    **arguments: Any,
) -> None:  # fmt: skip
    """Serve a model on this machine until Ctrl-C: a router, a scheduler and gpuworkers.

    Without options: the small built-in model (fetched once), on 127.0.0.1:8700, with an embedded
    status store, on all processors. A service that dies is started again. After a restart of all,
    requests that were running go on: the embedded store keeps them.

    \b
    Examples:
      headrace serve
      headrace serve --model ./Llama-3.2-1B-Instruct --port 9000
      headrace serve --num-kv-blocks 64 --log-level info
    """
    serving = {name: arguments.pop(name) for name in _SERVING}
    store = {name: arguments.pop(name) for name in ("store_url", "data_dir", "ephemeral")}
    if store["ephemeral"] and (store["data_dir"] or store["store_url"]):
        raise click.UsageError("--ephemeral goes with neither --data-dir nor --store-url")
    if store["data_dir"] and store["store_url"] is not None:
        raise click.UsageError("--data-dir is of the embedded store; leave out --store-url")
    _check_free(host, port)
    seen = _seen_serving(serving | {"drain_timeout_s": drain_timeout_s}, config_file)
    with ProgressSteps() as steps:
        config = make_config(
            arguments,
            steps,
            listen=f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            admin_listen="" if no_admin else _admin_listen(port, admin_port, config_file),
            store_url=store["store_url"],
            drain_timeout_s=seen.drain_timeout_s,
            file=config_file,
            router_flags=flags(serving),
            channel=_channel(seen),
        )
        data_dir = store["data_dir"]
        if port and not store["ephemeral"]:
            data_dir = data_dir or _data_dir(config.model_name, port)
        asyncio.run(_serve(replace(config, data_dir=data_dir), steps, _caller_options(seen)))


def _data_dir(model_name: str, port: int) -> Path:
    """The embedded store's folder, the same after a restart: one process serves a port."""
    from headrace.status.embedded import default_data_dir

    return default_data_dir(f"{re.sub(r'[^A-Za-z0-9._-]', '_', model_name)}-{port}")


def _admin_listen(port: int, admin_port: int | None, file: Path | None) -> str:
    """Where the router's admin port listens: the flag, else the settings, else beside the port."""
    from headrace.service.admin import AdminConfig
    from headrace.service.config import load

    if admin_port is not None:
        _check_free("127.0.0.1", admin_port, "--admin-port")
        return f"127.0.0.1:{admin_port}"
    if listen := load(AdminConfig, section="admin", file=file, environ=os.environ).listen:
        return listen
    beside = (port + 1) % 65536 if port else 0
    try:
        _check_free("127.0.0.1", beside)
    except Failure:
        beside = 0
    # A port is chosen here, not by the router: the console's URL outlives the router.
    return f"127.0.0.1:{beside or _free_port()}"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _check_free(host: str, port: int, options: str = "--port or --host") -> None:
    """Reports a taken port now rather than after the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        # The text after the reason repeats the address.
        reason = str(error.strerror).partition(" (while")[0]
        raise Failure(
            f"cannot listen on {host}:{port} ({reason}); choose another {options}"
        ) from error


def _seen_serving(given: dict[str, Any], file: Path | None) -> "ServingConfig":
    """The router's serving settings: flags over environment over file, as the router reads them.

    Raises ConfigError for a bad certificate or token before a model is loaded.
    """
    from headrace.service.config import is_set, load
    from headrace.service.keys import watch_keys
    from headrace.service.serving import ServingConfig
    from headrace.service.tls import read_authorities, read_pair

    overrides = {name: value for name, value in given.items() if value not in {None, ""}}
    if not is_set("drain_timeout_s", section="serving", file=file, environ=os.environ):
        # Shorter than a service's default: a person at a terminal waits.
        overrides.setdefault("drain_timeout_s", _DRAIN_TIMEOUT_S)
    serving = load(
        ServingConfig, section="serving", file=file, environ=os.environ, overrides=overrides
    )
    watch_keys(serving.auth_token_file, serving.api_keys_file)
    if serving.tls_cert_file or serving.tls_key_file:
        read_pair(serving.tls_cert_file, serving.tls_key_file)
    if serving.tls_client_ca_file:
        read_authorities(serving.tls_client_ca_file)
    return serving


def _channel(serving: "ServingConfig") -> "ChannelConfig | None":
    """The channel for asking the router whether it is ready; None where the authority of its
    certificate, or a key, is not known here.
    """
    from headrace.client import ChannelConfig

    if serving.tls_cert_file or (serving.api_keys_file and not serving.auth_token_file):
        return None
    return ChannelConfig(auth_token_file=serving.auth_token_file)


def _caller_options(serving: "ServingConfig") -> str:
    """What a caller's command needs beside --server."""
    options = ""
    if serving.tls_cert_file:
        options += " --tls-ca-file CA.pem"
    if serving.tls_client_ca_file:
        options += " --tls-cert-file YOURS.pem --tls-key-file YOURS.key"
    if serving.auth_token_file:
        options += f" --auth-token-file {serving.auth_token_file}"
    elif serving.api_keys_file:
        options += " --auth-token-file YOUR.key"
    return options


async def _serve(config: "LocalConfig", steps: ProgressSteps, caller_options: str) -> None:
    from headrace.local import LocalError, local_pool

    ours = asyncio.current_task()
    assert ours is not None, "inside the loop"
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ours.cancel)
    try:
        async with local_pool(config, tell=steps.begin, log=steps.log) as pool:
            steps.done()
            click.echo(_welcome(config.model_name, pool, caller_options))
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


def _welcome(model: str, pool: "LocalPool", caller_options: str) -> str:
    address = pool.address
    admin = ""
    if pool.admin_url:
        admin = f"Console: {pool.admin_url}  (metrics: {pool.admin_url}/metrics)\n"
    server = "" if address == "127.0.0.1:8700" else f" --server {address}"
    server += caller_options
    return (
        f"Serving {model} at {address} (gRPC, headrace.v1.Inference). In another terminal:\n"
        f"  headrace chat{server}\n"
        f'  headrace generate{server} --chat "Why is the sky blue?"\n'
        f"  headrace top{server}\n"
        f"{admin}"
        "Ctrl-C stops it."
    )
