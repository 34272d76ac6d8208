"""`headrace pool-controller`: scales pools of gpuworkers on Kubernetes by their load."""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable
from typing import Any

import click

from headrace.cli.exits import Failure, run
from headrace.cli.options import all_of, connection_options, take_connection
from headrace.kubernetes.sizing import Targets

_POOL = re.compile(r"([a-z0-9.-]+)=(\d+):(\d+)")


# Numbers of Targets that are options: the most that may be given, and the help. The largest
# latencies are the largest bounds of the routers' histograms.
_TARGETS: dict[str, tuple[float | None, str]] = {
    "kv_use": (1, "Fraction of the KV blocks that should be in use."),
    "queued_per_worker": (None, "Requests that may wait in the routers for each worker."),
    "queue_wait_s": (600, "Seconds until a worker begins with a request, at most."),
    "ttft_s": (10, "Seconds to a request's first token, at most."),
    "tpot_s": (2.5, "Seconds a token after the first, at most."),
    "up_after_s": (None, "How long a pool is overloaded before it grows."),
    "down_after_s": (None, "How long a pool could do with one worker less before it shrinks."),
    "dwell_s": (None, "Least time between two changes of a pool."),
}


def _target(name: str) -> Callable[[Any], Any]:
    """The option of a number in Targets, with the default that it has there."""
    most, text = _TARGETS[name]
    return click.option(
        "--" + name.replace("_", "-"),
        type=click.FloatRange(0, most),
        default=getattr(Targets(), name),
        show_default=True,
        help=text,
    )


@click.command("pool-controller")
@click.option(
    "--pool",
    "pools",
    multiple=True,
    required=True,
    metavar="STATEFULSET=MIN:MAX",
    help="A pool, and the fewest and most workers that it may have. (repeatable)",
)
@all_of(tuple(map(_target, _TARGETS)))
@click.option(
    "--roles",
    is_flag=True,
    help="Move workers between prefill and decode in pools that have both, and size a pool of one"
    " role by what that role does.",
)
@click.option(
    "--interval-s",
    type=click.FloatRange(0.1, 5),
    default=5.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--lease-name",
    default="headrace-pool-controller",
    show_default=True,
    help="Lease by which one controller of several leads; one for each release.",
)
@click.option("--namespace", default="", help="Namespace of the pools.  [default: the pod's own]")
@click.option(
    "--kubeconfig", default="", help="Kubeconfig file.  [default: the pod's, or ~/.kube/config]"
)
@click.option("--dry-run", is_flag=True, help="Say what would be changed, and change nothing.")
@connection_options
def pool_controller(
    pools: tuple[str, ...],
    roles: bool,
    interval_s: float,
    dry_run: bool,
    **arguments: Any,
) -> None:
    """Scale pools of gpuworkers by their KV use, by what waits in the routers, and by latencies.

    The signal that is highest above its target counts; a target of 0 leaves its signal out.
    Latencies are the 95th percentiles of the last minute. --server may name several routers, or
    all of them, as a headless Service does; of several controllers one leads. Leave a pool to the
    controller alone: no HPA, no KEDA.

    \b
    Examples:
      headrace pool-controller --pool headrace-gpuworker-default=1:8 --dry-run
      headrace pool-controller --pool headrace-gpuworker-default=2:8 --ttft-s 0.5 --tpot-s 0.05 \\
          --server headrace-router-headless:8700
    """
    values = {name: arguments.pop(name) for name in _TARGETS}
    if roles and not values["tpot_s"]:
        raise click.UsageError("--roles needs --tpot-s: nothing else says how decode workers do")
    targets = {}
    for pool in pools:
        if (parts := _POOL.fullmatch(pool)) is None or int(parts[2]) > int(parts[3]):
            raise click.BadParameter(f"{pool!r} is no STATEFULSET=MIN:MAX", param_hint="--pool")
        bounds = {"min_replicas": int(parts[2]), "max_replicas": int(parts[3])}
        targets[parts[1]] = Targets(**bounds, **values, by_role=roles)
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s pool-controller %(message)s"
    )
    run(_control(targets, interval_s, arguments, is_dry_run=dry_run))


async def _control(
    targets: dict[str, Targets],
    interval_s: float,
    arguments: dict[str, Any],
    *,
    is_dry_run: bool,
) -> None:
    """Control until SIGTERM or SIGINT, which let another controller lead at once."""
    try:
        from headrace.kubernetes.api import connect
        from headrace.kubernetes.controller import PoolController
    except ModuleNotFoundError as error:
        raise Failure(f"{error}: install headrace[kubernetes]") from error
    from headrace.pool_load import PoolLoad
    from headrace.service.discovery import DiscoveryConfig
    from headrace.service.serving import stop_asked

    where = {name: arguments.pop(name) for name in ("namespace", "kubeconfig")}
    config = DiscoveryConfig("kubernetes", **where)
    lease_name = arguments.pop("lease_name")
    server, channel = take_connection(arguments)
    async with await connect(config) as api, PoolLoad(server, channel, list(targets)) as load:
        how = {"set_role": load.set_role, "lease_name": lease_name, "is_dry_run": is_dry_run}
        controller = PoolController(api, targets, load.measure, **how)
        controlling = asyncio.create_task(controller.run(interval_s))
        stopping = asyncio.create_task(stop_asked().wait())
        await asyncio.wait([controlling, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, controlling):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await controlling
