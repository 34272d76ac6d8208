"""`headrace pool-controller`: scales pools of gpuworkers on Kubernetes by their load."""

import logging
import re
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.exits import Failure, run
from headrace.cli.options import connection_options, open_client

if TYPE_CHECKING:
    from headrace.client import HeadraceClient
    from headrace.kubernetes.sizing import Measured, Targets
    from headrace.types import PoolInfo

_POOL = re.compile(r"([a-z0-9.-]+)=(\d+):(\d+)")


@click.command("pool-controller")
@click.option(
    "--pool",
    "pools",
    multiple=True,
    required=True,
    metavar="STATEFULSET=MIN:MAX",
    help="A pool, and the fewest and most workers that it may have. (repeatable)",
)
@click.option(
    "--kv-use",
    type=click.FloatRange(0.05, 1),
    default=0.8,
    show_default=True,
    help="Fraction of the KV blocks that should be in use.",
)
@click.option(
    "--queued-per-worker",
    type=click.FloatRange(min=0, min_open=True),
    default=2.0,
    show_default=True,
    help="Requests that may wait in the router for each worker.",
)
@click.option(
    "--up-after-s",
    type=click.FloatRange(min=0),
    default=15.0,
    show_default=True,
    help="How long a pool is overloaded before it grows.",
)
@click.option(
    "--down-after-s",
    type=click.FloatRange(min=0),
    default=300.0,
    show_default=True,
    help="How long a pool could do with one worker less before it shrinks.",
)
@click.option(
    "--dwell-s",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Least time between two changes of a pool.",
)
@click.option(
    "--interval-s",
    type=click.FloatRange(0.1, 5),
    default=5.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option("--namespace", default="", help="Namespace of the pools.  [default: the pod's own]")
@click.option(
    "--kubeconfig", default="", help="Kubeconfig file.  [default: the pod's, or ~/.kube/config]"
)
@click.option("--dry-run", is_flag=True, help="Say what would be changed, and change nothing.")
@connection_options
def pool_controller(
    pools: tuple[str, ...],
    interval_s: float,
    namespace: str,
    kubeconfig: str,
    dry_run: bool,
    **arguments: Any,
) -> None:
    """Scale pools of gpuworkers by their KV use and by what waits in the router.

    Of several controllers one leads. Leave a pool to the controller alone: no HPA, no KEDA.

    \b
    Example:
      headrace pool-controller --pool headrace-gpuworker-default=1:8 --dry-run
    """
    from headrace.kubernetes.sizing import Targets

    names = ("kv_use", "queued_per_worker", "up_after_s", "down_after_s", "dwell_s")
    values = {name: arguments.pop(name) for name in names}
    targets = {}
    for pool in pools:
        if (parts := _POOL.fullmatch(pool)) is None or int(parts[2]) > int(parts[3]):
            raise click.BadParameter(f"{pool!r} is no STATEFULSET=MIN:MAX", param_hint="--pool")
        bounds = {"min_replicas": int(parts[2]), "max_replicas": int(parts[3])}
        targets[parts[1]] = Targets(**bounds, **values)
    logging.basicConfig(
        level="INFO", format="%(asctime)s %(levelname)s pool-controller %(message)s"
    )
    run(_control(targets, interval_s, namespace, kubeconfig, arguments, is_dry_run=dry_run))


async def _control(
    targets: "dict[str, Targets]",
    interval_s: float,
    namespace: str,
    kubeconfig: str,
    arguments: dict[str, Any],
    *,
    is_dry_run: bool,
) -> None:
    try:
        from headrace.kubernetes.api import connect
        from headrace.kubernetes.controller import PoolController
    except ModuleNotFoundError as error:
        raise Failure(f"{error}: install headrace[kubernetes]") from error
    from headrace.service.discovery import DiscoveryConfig

    config = DiscoveryConfig("kubernetes", namespace=namespace, kubeconfig=kubeconfig)
    async with await connect(config) as api, open_client(arguments) as client:

        async def measure(pool: str) -> "Measured":
            return await _measured(client, pool, list(targets))

        await PoolController(api, targets, measure, is_dry_run=is_dry_run).run(interval_s)


async def _measured(client: "HeadraceClient", pool: str, pools: list[str]) -> "Measured":
    from headrace.connections import UnreachableError
    from headrace.service.errors import ServiceError

    try:
        return measured(await client.pool(), pool, pools)
    except (ServiceError, UnreachableError) as error:
        raise OSError(f"the router does not say: {error}") from error


def measured(found: "PoolInfo", pool: str, pools: list[str]) -> "Measured":
    """What a pool measures, whose workers are named like its pods.

    What waits in the router waits for any worker, so each pool gets a share by its ready workers.
    """
    from headrace.kubernetes.sizing import Measured

    ready = {
        name: [w for w in found.workers if w.state == "ready" and _is_of(w.worker_id, name)]
        for name in pools
    }
    mine, num_ready = ready[pool], sum(map(len, ready.values()))
    num_blocks = sum(worker.num_kv_blocks for worker in mine)
    num_free = sum(worker.num_free_kv_blocks for worker in mine)
    share = len(mine) / num_ready if num_ready else 1 / len(pools)
    return Measured(
        num_ready=len(mine),
        kv_use=1 - num_free / num_blocks if num_blocks else 0.0,
        num_queued=round(found.num_queued * share) if num_ready else found.num_queued,
    )


def _is_of(worker_id: str, pool: str) -> bool:
    """Whether a worker is a pod of the pool's StatefulSet."""
    name, _, ordinal = worker_id.rpartition("-")
    return name == pool and ordinal.isdigit()
