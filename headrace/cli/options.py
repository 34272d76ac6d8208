"""Options that several commands share: connection, request and sampling."""

from collections.abc import Callable, Coroutine
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.cli.exits import run
from headrace.parameters import PARAMETERS

if TYPE_CHECKING:
    from headrace.client import HeadraceClient
    from headrace.service.channels import ChannelConfig
    from headrace.types import Sampling

ClickCommand = TypeVar("ClickCommand", bound=Callable[..., Any])
T = TypeVar("T")

DEFAULT_SERVER = "127.0.0.1:8700"

_CONNECTION = (
    click.option(
        "--server",
        default=DEFAULT_SERVER,
        envvar="HEADRACE_SERVER",
        show_default=True,
        show_envvar=True,
        metavar="HOST:PORT",
        help="The router to talk to; several, separated by commas: the first that answers.",
    ),
    click.option("--tls", is_flag=True, help="Use TLS, trusting the system's authorities."),
    click.option(
        "--tls-ca-file", default="", metavar="PEM", help="Authorities to trust; turns TLS on."
    ),
    click.option("--tls-cert-file", default="", metavar="PEM", help="Client certificate (mTLS)."),
    click.option(
        "--tls-key-file", default="", metavar="PEM", help="Private key of that certificate."
    ),
    click.option(
        "--auth-token-file",
        default="",
        envvar="HEADRACE_AUTH_TOKEN_FILE",
        show_envvar=True,
        metavar="FILE",
        help="File with the API key or token to send.",
    ),
)

# `headrace models --json` shows them.
_THE_MODELS = "[default: the model's]"

_SAMPLING = (
    *(
        click.option(
            "--" + parameter.name.replace("_", "-"),
            type=int if parameter.is_whole else float,
            help=f"{parameter.help}  {_THE_MODELS}" if parameter.is_recommended else parameter.help,
        )
        for parameter in sorted(PARAMETERS, key=lambda p: (p.stage.value, p.counts_tokens))
    ),
    click.option("--seed", type=int, help="Seed of sampling, for reproducible output."),
    click.option(
        "--logit-bias",
        multiple=True,
        metavar="ID=VALUE",
        help="Add to a token's logit. (repeatable)",
    ),
    click.option(
        "--max-tokens",
        type=int,
        help="Most tokens to generate.  [default: the model's, else 1024 in chat, else what fits]",
    ),
    click.option(
        "--min-tokens", type=int, default=0, help="Fewest tokens before the answer can end."
    ),
    click.option(
        "--stop",
        multiple=True,
        metavar="TEXT",
        help="Text that ends the answer; not shown. (repeatable)",
    ),
    click.option(
        "--stop-token-id",
        "stop_token_ids",
        type=int,
        multiple=True,
        metavar="ID",
        help="Token that ends the answer. (repeatable)",
    ),
    click.option(
        "--bad-word",
        "bad_words",
        multiple=True,
        metavar="TEXT",
        help="Text that must not be generated. (repeatable)",
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end-of-sequence token."),
)

_REQUEST = (
    click.option("--model", default="", help="Model name; needed only where several are served."),
    click.option(
        "--priority",
        type=int,
        default=0,
        help="Smaller is more urgent, where the server's policy uses priorities.",
    ),
    click.option(
        "--tenant", default="", help="Account to bill; service is divided fairly between tenants."
    ),
    click.option("--deadline-s", type=float, help="End the request after this many seconds."),
    click.option(
        "--cache-salt",
        default="",
        help="Share cached prefixes only with requests of the same salt.",
    ),
    click.option(
        "--keep-special-tokens", is_flag=True, help="Show control tokens like <|im_end|>."
    ),
)


def all_of(
    options: tuple[Callable[[Any], Any], ...],
) -> Callable[[ClickCommand], ClickCommand]:
    """A click decorator that adds several options, in this order."""

    def decorate(command: ClickCommand) -> ClickCommand:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


connection_options = all_of(_CONNECTION)
sampling_options = all_of(_SAMPLING)
request_options = all_of(_REQUEST)
resume_option = click.option(
    "--resume-timeout-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Time to go on with an answer whose connection is lost; 0: a lost connection ends it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")

CONNECTION_NAMES = (
    "server",
    "tls",
    "tls_ca_file",
    "tls_cert_file",
    "tls_key_file",
    "auth_token_file",
)
_REQUEST_NAMES = (
    "model",
    "priority",
    "tenant",
    "deadline_s",
    "cache_salt",
    "keep_special_tokens",
)


def open_client(arguments: dict[str, Any]) -> "HeadraceClient":
    """The client that a command's connection options describe; removes them from `arguments`.

    Call this inside the event loop.
    """
    from headrace.cli.printing import note
    from headrace.client import HeadraceClient, ResumePolicy

    server, config = take_connection(arguments)
    policy = ResumePolicy(timeout_s=arguments.pop("resume_timeout_s", 0.0))
    return HeadraceClient(server, config, resume=policy, tell=note)


def take_connection(arguments: dict[str, Any]) -> "tuple[str, ChannelConfig]":
    """Removes the connection options from `arguments`: the routers, and how to call them."""
    from headrace.service.channels import ChannelConfig

    taken = {name: arguments.pop(name) for name in CONNECTION_NAMES}
    server = str(taken.pop("server"))
    for address in server.split(","):
        _check_address(address.strip())
    return server, ChannelConfig(**taken)


def ask(arguments: dict[str, Any], call: Callable[["HeadraceClient"], Coroutine[Any, Any, T]]) -> T:
    """The result of one call to the router that a command's connection options name."""

    async def work() -> T:
        async with open_client(arguments) as client:
            return await call(client)

    return run(work())


def _check_address(address: str) -> None:
    """Refuses addresses that gRPC would silently interpret in another way."""
    port = address.rpartition(":")[2]
    if ":" not in address:
        wrong = f"{address!r} has no port"
    elif not address.startswith("unix:") and not (port.isdecimal() and 0 < int(port) < 65536):
        wrong = f"{port!r} is not a port"
    else:
        return
    raise click.BadParameter(
        f"{wrong}; write HOST:PORT, like {DEFAULT_SERVER}", param_hint="--server"
    )


def take_request_options(arguments: dict[str, Any]) -> dict[str, Any]:
    """Removes the options of `HeadraceClient.generate` from `arguments` and returns them."""
    return {name: arguments.pop(name) for name in _REQUEST_NAMES}


def make_sampling(arguments: dict[str, Any]) -> "Sampling":
    """The sampling that a command's remaining arguments describe."""
    from headrace.types import Sampling

    bias = dict(map(_logit_bias, arguments.pop("logit_bias")))
    return Sampling(logit_bias=bias, **arguments)


def _logit_bias(text: str) -> tuple[int, float]:
    token_id, _, value = text.partition("=")
    try:
        return int(token_id), float(value)
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is not ID=VALUE, like 198=-100", param_hint="--logit-bias"
        ) from None


def print_json(value: Any) -> None:
    """One JSON value on stdout; dataclasses become objects."""
    import json

    def plain(item: Any) -> Any:
        return asdict(item) if is_dataclass(item) and not isinstance(item, type) else item

    value = [plain(item) for item in value] if isinstance(value, list) else plain(value)
    click.echo(json.dumps(value, ensure_ascii=False))
