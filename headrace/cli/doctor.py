"""`headrace doctor`: checks a deployment, and says what to do about what is wrong."""

from pathlib import Path
from typing import Any

import click

from headrace.cli.exits import Failure, run
from headrace.cli.options import CONNECTION_NAMES, connection_options, json_option, print_json


@click.command()
@click.option(
    "--scheduler", "schedulers", multiple=True, metavar="HOST:PORT", help="Check it. (repeatable)"
)
@click.option(
    "--worker", "workers", multiple=True, metavar="HOST:PORT", help="Check it. (repeatable)"
)
@click.option(
    "--scheduler-token-file", default="", metavar="FILE", help="Token to send to schedulers."
)
@click.option("--worker-token-file", default="", metavar="FILE", help="Token to send to workers.")
@click.option(
    "--store-url",
    default="",
    envvar="HEADRACE_ROUTER_STORE_URL",
    show_envvar=True,
    help="Check this status store.",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path, exists=True),
    help="TOML file of a router or a scheduler: check what it connects to, in its way.",
)
@json_option
@connection_options
def doctor(config_file: Path | None, as_json: bool, **arguments: Any) -> None:  # fmt: skip
    """Check a deployment from the outside: ports, TLS, keys, versions, clocks, store, workers.

    The router (--server) tells of the schedulers and workers behind it, if the key is an
    administrator's. Where these can be reached from here, name them to check their ports, too; TLS
    options are for all services. Exit code 1 when there is a problem; warnings alone are 0.

    \b
    Examples:
      headrace doctor
      headrace doctor --server router:8700 --tls-ca-file ca.crt --auth-token-file admin.key
      headrace doctor --config /etc/headrace/config/router.toml --store-url redis://store:6379
    """
    from headrace.doctor import targets
    from headrace.service.channels import ChannelConfig

    taken = {name: arguments.pop(name) for name in CONNECTION_NAMES}
    server = taken.pop("server")
    tokens = {
        kind: {"auth_token_file": arguments.pop(f"{kind}_token_file")}
        for kind in ("scheduler", "worker")
    }
    found = targets.Targets(
        routers=[address.strip() for address in server.split(",")],
        schedulers=list(arguments["schedulers"]),
        workers=list(arguments["workers"]),
        store_url=arguments["store_url"],
        router_channel=ChannelConfig(**taken),
        scheduler_channel=ChannelConfig(**taken | tokens["scheduler"]),
        worker_channel=ChannelConfig(**taken | tokens["worker"]),
    )
    if config_file is not None:
        found = targets.add_config(found, config_file)
    report = run(targets.check(found))
    if as_json:
        print_json(report.findings)
    else:
        _print(report)
    if report.num_problems:
        raise Failure(f"{report.num_problems} problems were found")


def _print(report: Any) -> None:
    width = max((len(finding.target) for finding in report.findings), default=0)
    for finding in report.findings:
        line = f"{finding.level:<8} {finding.target:<{width}}  {finding.check}: {finding.message}"
        click.echo(line)
        if finding.advice:
            click.echo(f"{'':<8} {'':<{width}}  -> {finding.advice}")
