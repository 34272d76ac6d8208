"""Sets the replicas of pools and the roles of workers, while it leads.

It measures, decides (see `sizing` and `roles`), and changes one thing of a pool at a time.

Of several controllers one leads, by a lease; the others wait for its end.
"""

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from headrace.kubernetes.api import Api, ApiError
from headrace.kubernetes.leases import Lease, LeaseKind, Leases, Sightings
from headrace.kubernetes.roles import divide
from headrace.kubernetes.sizing import Measured, Targets, Trend, decide
from headrace.vocabulary import WorkerRole

logger = logging.getLogger(__name__)

_LEASE_DURATION_S = 15
_WATCH_S = 5.0
_MERGE_PATCH = "application/merge-patch+json"


class Leader:
    """The leadership of this process."""

    def __init__(self, api: Api, lease_name: str) -> None:
        """lease_name: the same for controllers of the same pools."""
        self._name = lease_name
        self._leases = Leases(api, lease_name)
        self._listing = self._leases.listing(_WATCH_S)
        self._sightings = Sightings()
        self._holder = uuid.uuid4().hex
        self.is_leading = False

    async def renew(self) -> bool:
        """Whether this process leads from now on; ask more often than every 5 s.

        Raises:
            ApiError: the server does not say.
        """
        self.is_leading = False
        snapshot = await self._listing.list()
        live = self._sightings.observe(snapshot.asked_s, snapshot.objects.values())
        lease = snapshot.objects.get(self._name) or Lease(self._name, LeaseKind.LEADER)
        is_ours = lease.holder == self._holder
        if self._name in live and not is_ours:
            return False
        taken = replace(
            lease,
            holder=self._holder,
            transitions=lease.transitions + (not is_ours),
            duration_s=_LEASE_DURATION_S,
        )
        await self._leases.write(taken)
        self.is_leading = True
        return True

    async def release(self) -> None:
        """Let another process lead at once."""
        if not self.is_leading:
            return
        lease = (await self._listing.list()).objects.get(self._name)
        if lease is not None and lease.holder == self._holder:
            await self._leases.write(replace(lease, holder=""))


@dataclass(slots=True)
class Pool:
    """A StatefulSet of workers, its targets, and what is remembered of it."""

    name: str
    targets: Targets
    trend: Trend = field(default_factory=Trend)
    division: Trend = field(default_factory=Trend)
    said: str = ""

    def changed(self, now_s: float) -> None:
        """What was measured before a change says nothing of what the pool is now."""
        self.trend = self.division = Trend(changed_s=now_s)


class PoolController:
    """Scales pools while this process leads."""

    def __init__(
        self,
        api: Api,
        targets: Mapping[str, Targets],
        measure: Callable[[], Awaitable[Mapping[str, Measured]]],
        *,
        set_role: Callable[[str, WorkerRole], Awaitable[object]],
        lease_name: str,
        is_dry_run: bool,
    ) -> None:
        """
        Args:
            targets: by the name of a StatefulSet.
            measure: all pools now; OSError if that fails.
            set_role: gives a worker a role, where targets are by role; OSError if that fails.
            lease_name: of the lease by which one of several controllers leads.
            is_dry_run: only say what would be done.
        """
        self._api = api
        self._pools = [Pool(name, of) for name, of in targets.items()]
        self._measure = measure
        self._set_role = set_role
        self._is_dry_run = is_dry_run
        self._leader = Leader(api, lease_name)

    async def run(self, interval_s: float) -> None:
        """Control until cancelled; then another controller leads at once."""
        try:
            while True:
                await self.step()
                await asyncio.sleep(interval_s)
        finally:
            await self._leader.release()

    async def step(self) -> None:
        """One look at every pool, if this process leads."""
        was_leading = self._leader.is_leading
        try:
            if not await self._leader.renew():
                return
        except ApiError as error:
            logger.warning("cannot lead: %s", error)
            return
        if not was_leading:
            logger.info("leads%s", ", and changes nothing (--dry-run)" * self._is_dry_run)
        try:
            measured = await self._measure()
        except OSError as error:
            logger.warning("%s", error)
            return
        for pool in self._pools:
            try:
                now_s = asyncio.get_running_loop().time()
                if not await self._divide(pool, measured[pool.name], now_s):
                    await self._scale(pool, measured[pool.name], now_s)
            except (ApiError, OSError) as error:
                logger.warning("%s: %s", pool.name, error)

    async def _divide(self, pool: Pool, measured: Measured, now_s: float) -> bool:
        """Move a worker between prefill and decode if that is due; returns whether it was."""
        if not pool.targets.by_role:
            return False
        move, pool.division = divide(measured, pool.targets, pool.division, now_s)
        if move is None:
            return False
        if not self._is_dry_run:
            await self._set_role(move.worker_id, move.role)
        logger.info("%s: %s becomes %s: %s", pool.name, move.worker_id, move.role, move.reason)
        pool.changed(now_s)
        return True

    async def _scale(self, pool: Pool, measured: Measured, now_s: float) -> None:
        namespace = self._api.namespace
        path = f"/apis/apps/v1/namespaces/{namespace}/statefulsets/{pool.name}/scale"
        scale = await self._api.call("GET", path)
        replicas = int(scale["spec"].get("replicas", 0))
        decision, trend = decide(replicas, measured, pool.targets, pool.trend, now_s)
        if decision.replicas != replicas:
            says = f"{replicas} -> {decision.replicas} workers: {decision.reason}"
            if not self._is_dry_run:
                body = {
                    # Refused when somebody else has scaled the pool in the meantime.
                    "metadata": {"resourceVersion": scale["metadata"]["resourceVersion"]},
                    "spec": {"replicas": decision.replicas},
                }
                await self._api.call("PATCH", path, body=body, content_type=_MERGE_PATCH)
            pool.changed(now_s)
        else:
            says = f"{replicas} workers"
            pool.trend = trend
        if says != pool.said:
            logger.info("%s: %s", pool.name, says)
        pool.said = says
