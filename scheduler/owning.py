"""Which workers a scheduler drives, when schedulers share what they find in Kubernetes."""

from typing import TYPE_CHECKING

from headrace.service.channels import ChannelConfig
from headrace.service.config import ConfigError
from headrace.service.discovery import DiscoveryConfig, OwnershipConfig
from scheduler.pool import Pool
from scheduler.rpc.gpuworker_client import ExecuteStream, GpuWorkerClient
from scheduler.worker import WorkerTakenError

if TYPE_CHECKING:
    from headrace.kubernetes.ownership import OwnedWorker, Ownership


async def share_workers(
    discovery: DiscoveryConfig,
    selector: str,
    config: OwnershipConfig,
    *,
    scheduler_id: str,
    drives: "OwnedWorkers",
) -> "Ownership":
    """The scheduler's part of the workers that a selector finds.

    Raises:
        ConfigError: nothing says where the API server is, or leases would end between renewals.
    """
    # A watch lasts a second or more.
    if config.lease_duration_s < 3 * max(1.0, config.renew_every_s):
        raise ConfigError(
            "--ownership-lease-duration-s: must be 3 x --ownership-renew-every-s, or more"
        )
    from headrace.kubernetes.api import connect
    from headrace.kubernetes.ownership import Ownership

    api = await connect(discovery)
    return Ownership(api, discovery, selector, config, member=scheduler_id, drives=drives)


class OwnedWorkers:
    """Drives the workers whose leases this scheduler has; see headrace.kubernetes.ownership."""

    def __init__(self, pool: Pool, channel: ChannelConfig) -> None:
        self._pool = pool
        self._channel = channel

    def add(self, worker: "OwnedWorker") -> None:
        """Drive a worker, with the number of its lease as the term."""
        self._pool.add(worker.address, _LeasedClient(worker, self._channel))

    def retire(self, address: str) -> None:
        """Give a worker nothing new, and leave it when it has no request."""
        self._pool.retire(address)

    def num_requests(self, address: str) -> int | None:
        """Requests on a worker; None when it is not driven."""
        return self._pool.num_requests(address)


class _LeasedClient(GpuWorkerClient):
    """A client whose term is that of a lease, which may rise."""

    def __init__(self, worker: "OwnedWorker", channel: ChannelConfig) -> None:
        super().__init__(worker.address, channel, term=worker.term)
        self._worker = worker

    async def execute(self) -> ExecuteStream:
        self._term = self._worker.term
        try:
            return await super().execute()
        except WorkerTakenError:
            self._worker.contest()
            raise
