"""Ownership of workers by leases, so that two schedulers never drive one worker.

Every scheduler renews one lease of its own, which says that it lives. A lease for each worker names
the scheduler, and the run of the scheduler, that owns the worker; it is written only when the owner
changes, always over the version that was read. Its number of transitions is the term by which the
worker refuses an earlier owner, so an owner that was stopped, or cut off, does no harm when it
wakes up. An owner that cannot reach the API server goes on: only a newer term ends it.
"""

import asyncio
import contextlib
import hashlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from headrace.kubernetes.api import Api, ApiError
from headrace.kubernetes.assignment import assign
from headrace.kubernetes.leases import CONFLICT, Lease, LeaseKind, Leases, Sightings
from headrace.kubernetes.listing import Snapshot
from headrace.kubernetes.pods import list_pods
from headrace.service import terms
from headrace.service.discovery import DiscoveryConfig, OwnershipConfig
from headrace.service.peers import Peer

logger = logging.getLogger(__name__)


class Drives(Protocol):
    """What drives the workers that are owned."""

    def add(self, worker: "OwnedWorker") -> None:
        """Drive a worker from now on, at its address."""
        ...

    def retire(self, address: str) -> None:
        """Give a worker nothing new, and leave it when it has nothing left."""
        ...

    def num_requests(self, address: str) -> int | None:
        """Requests on the worker; None when it is not driven (any more)."""
        ...


class OwnedWorker:
    """A worker while this scheduler has its lease."""

    def __init__(self, lease: Lease, address: str, owned_since_s: float) -> None:
        self.lease = lease
        self.address = address
        self.owned_since_s = owned_since_s
        # Since when another scheduler should have the worker, and since when it is retired.
        self.surplus_since_s: float | None = None
        self.retired_since_s: float | None = None
        self.num_refusals = 0
        self.is_refused = False

    @property
    def term(self) -> int:
        """The term of the worker's Execute stream."""
        return terms.FIRST_LEASED + self.lease.transitions

    def contest(self) -> None:
        """The worker has refused the term: it knows a greater one.

        Then somebody else has the lease, or the lease was deleted and its number began again; in
        the second case the number is raised.
        """
        self.is_refused = True


@dataclass(frozen=True, slots=True)
class _View:
    """What the last list of leases says: who lives, who may own workers, who owns what."""

    leases: Mapping[str, Lease]
    eligible: frozenset[str]
    # The live scheduler that owns a worker.
    owners: Mapping[str, str]


class Ownership:
    """This scheduler's part: its own lease, and the leases of the workers that it should own."""

    def __init__(
        self,
        api: Api,
        discovery: DiscoveryConfig,
        selector: str,
        config: OwnershipConfig,
        *,
        member: str,
        drives: Drives,
    ) -> None:
        """api is closed when `run` ends. member: this scheduler's name, which no other has."""
        self._api = api
        self._discovery = discovery
        self._selector = selector
        self._config = config
        self._member = member
        self._holder = f"{member}/{uuid.uuid4().hex[:8]}"
        self._drives = drives
        self._own: Lease | None = None
        self._renewed_s = float("-inf")
        self._num_renewals = 0
        self._owned: dict[str, OwnedWorker] = {}
        self._pods: Mapping[str, Peer] = {}
        self._snapshot: Snapshot[Lease] | None = None
        self._live: frozenset[str] = frozenset()
        self._sightings = Sightings()
        self._wake = asyncio.Event()
        self._is_draining = False
        # Nothing is written any more: another process has our name, or we end.
        self._is_over = False
        # Those who look for the same workers share them.
        group = hashlib.sha256(selector.encode()).hexdigest()[:16]
        self._leases = Leases(api, group)

    @property
    def num_renewals(self) -> int:
        """How often this scheduler has said that it lives."""
        return self._num_renewals

    @property
    def owned(self) -> Mapping[str, OwnedWorker]:
        """The workers that this scheduler owns, by name."""
        return self._owned

    async def run(self) -> None:
        """Own workers until cancelled."""
        async with self._api, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_pods())
            tasks.create_task(self._watch_leases())
            while True:
                self._wake.clear()
                await self._step()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._config.renew_every_s / 2):
                        await self._wake.wait()

    def drain(self) -> None:
        """Take no other worker, and give up each worker as soon as it has no request."""
        self._is_draining = True
        self._renewed_s = float("-inf")
        self._wake.set()

    async def release(self) -> None:
        """Say that this scheduler has ended, so that its workers are free; while `run` runs."""
        self._is_over = True
        if self._own is not None:
            await self._try(replace(self._own, holder=""))

    async def _watch_pods(self) -> None:
        listing = list_pods(self._api, self._discovery, self._selector)
        async for snapshot in listing.snapshots():
            self._pods = snapshot.objects
            self._wake.set()

    async def _watch_leases(self) -> None:
        async for snapshot in self._leases.listing(self._config.renew_every_s).snapshots():
            self._live = self._sightings.observe(snapshot.asked_s, snapshot.objects.values())
            self._snapshot = snapshot
            self._wake.set()

    async def _step(self) -> None:
        """One look at everything."""
        if (snapshot := self._snapshot) is None:
            return
        now_s = asyncio.get_running_loop().time()
        await self._renew(snapshot, now_s)
        for worker in list(self._owned.values()):
            if self._is_lost(worker, snapshot):
                self._lose(worker)
        if self._is_over:
            return
        view = self._view(snapshot)
        assigned = assign(self._free_to_assign(view), view.eligible, view.owners)
        for name, member in assigned.items():
            if member == self._member and name not in self._owned and name not in view.owners:
                await self._acquire(view.leases.get(name), self._pods[name])
        for worker in list(self._owned.values()):
            await self._tend(worker, assigned, now_s)

    async def _renew(self, snapshot: Snapshot[Lease], now_s: float) -> None:
        """Renews the lease that says that this scheduler lives."""
        listed = snapshot.objects.get(self._member)
        if self._is_replaced(listed, snapshot.asked_s):
            logger.error("another scheduler calls itself %s, and has its workers", self._member)
            self._is_over = True
            for worker in list(self._owned.values()):
                self._lose(worker)
        if self._is_over or now_s - self._renewed_s < self._config.renew_every_s:
            return
        base = self._own or listed or Lease(self._member, LeaseKind.SCHEDULER)
        lease = replace(
            base,
            kind=LeaseKind.SCHEDULER,
            holder=self._holder,
            transitions=base.transitions + (base.holder != self._holder),
            duration_s=self._config.lease_duration_s,
            is_draining=self._is_draining,
        )
        written = await self._try(lease)
        if written is not None:
            self._own, self._renewed_s = written, asyncio.get_running_loop().time()
            self._num_renewals += 1
        elif listed is not None and (self._own is None or listed.holder == self._own.holder):
            # Written by us without our knowing, or touched by a person: go on from what is there.
            self._own = replace(listed, holder=self._holder) if self._own else None

    def _is_replaced(self, listed: Lease | None, asked_s: float) -> bool:
        """Whether another process renews the lease with our name."""
        if listed is None or self._own is None or self._is_over or asked_s <= self._renewed_s:
            return False
        return listed.holder != self._own.holder

    def _is_lost(self, worker: OwnedWorker, snapshot: Snapshot[Lease]) -> bool:
        """Whether a list that is newer than our lease says that somebody else has it."""
        if snapshot.asked_s <= worker.owned_since_s:
            return False
        listed = snapshot.objects.get(worker.lease.name)
        return listed is None or listed.holder != self._holder

    def _lose(self, worker: OwnedWorker) -> None:
        logger.warning("%s is owned by another scheduler now", worker.lease.name)
        del self._owned[worker.lease.name]
        self._drives.retire(worker.address)

    def _view(self, snapshot: Snapshot[Lease]) -> _View:
        members = {
            lease.name: lease
            for lease in snapshot.objects.values()
            if lease.kind is LeaseKind.SCHEDULER and lease.name in self._live
        }
        if self._own is not None:
            members[self._member] = self._own
        # By the run, too: what an earlier run of a scheduler had is free.
        member_by_holder = {lease.holder: lease.name for lease in members.values()}
        owners = {
            lease.name: member_by_holder[lease.holder]
            for lease in snapshot.objects.values()
            if lease.kind is LeaseKind.WORKER and lease.holder in member_by_holder
        }
        # What we have written since that list.
        owners.update(dict.fromkeys(self._owned, self._member))
        eligible = frozenset(name for name, lease in members.items() if not lease.is_draining)
        if self._is_draining:
            eligible -= {self._member}
        return _View(snapshot.objects, eligible, owners)

    def _free_to_assign(self, view: _View) -> list[str]:
        """Workers that need an owner: no pod that leaves, and none whose owner drains."""
        return [
            name
            for name, pod in self._pods.items()
            if not pod.is_leaving and view.owners.get(name) in {None, *view.eligible}
        ]

    async def _acquire(self, lease: Lease | None, pod: Peer) -> None:
        base = lease or Lease(pod.name, LeaseKind.WORKER)
        wanted = replace(
            base,
            kind=LeaseKind.WORKER,
            holder=self._holder,
            transitions=base.transitions + 1,
            duration_s=self._config.lease_duration_s,
        )
        if (written := await self._try(wanted)) is not None:
            since_s = asyncio.get_running_loop().time()
            worker = self._owned[pod.name] = OwnedWorker(written, pod.address, since_s)
            logger.info("owns %s (%s) with term %d", pod.name, pod.address, written.transitions)
            self._drives.add(worker)

    async def _tend(self, worker: OwnedWorker, assigned: Mapping[str, str], now_s: float) -> None:
        """Follows the worker's pod, and gives the worker up where it should be another's."""
        name = worker.lease.name
        pod = self._pods.get(name)
        if worker.is_refused:
            await self._raise_term(worker)
        if worker.retired_since_s is None:
            if pod is not None and not pod.is_leaving and pod.address != worker.address:
                self._drives.retire(worker.address)
                worker.address = pod.address
                self._drives.add(worker)
            elif self._is_to_retire(worker, pod, assigned, now_s):
                worker.retired_since_s = now_s
                self._drives.retire(worker.address)
        if worker.retired_since_s is not None:
            # A pod that leaves has time until it is gone: no other scheduler wants it.
            is_late = now_s - worker.retired_since_s > self._config.release_timeout_s
            is_wanted = pod is not None and not pod.is_leaving
            if (is_late and is_wanted) or self._drives.num_requests(worker.address) is None:
                await self._give_up(worker)

    def _is_to_retire(
        self,
        worker: OwnedWorker,
        pod: Peer | None,
        assigned: Mapping[str, str],
        now_s: float,
    ) -> bool:
        if pod is None or pod.is_leaving:
            return True
        if self._is_draining:
            return not self._drives.num_requests(worker.address)
        if assigned.get(worker.lease.name, self._member) == self._member:
            worker.surplus_since_s = None
            return False
        if worker.surplus_since_s is None:
            worker.surplus_since_s = now_s
        return now_s - worker.surplus_since_s >= self._config.rebalance_after_s

    async def _raise_term(self, worker: OwnedWorker) -> None:
        """Raises the lease's number above the worker's: by 1, 2, 4, ... until it is enough."""
        worker.is_refused = False
        raised = worker.lease.transitions + 2**worker.num_refusals
        if (written := await self._try(replace(worker.lease, transitions=raised))) is None:
            return
        worker.num_refusals += 1
        worker.lease = written

    async def _give_up(self, worker: OwnedWorker) -> None:
        self._owned.pop(worker.lease.name, None)
        if await self._try(replace(worker.lease, holder="")) is not None:
            logger.info("has given up %s", worker.lease.name)

    async def _try(self, lease: Lease) -> Lease | None:
        """The lease as it was written; None if it was not: the next list says why."""
        try:
            return await self._leases.write(lease)
        except ApiError as error:
            level = logging.INFO if error.status == CONFLICT else logging.WARNING
            logger.log(level, "cannot write the lease %s: %s", lease.name, error)
            return None
