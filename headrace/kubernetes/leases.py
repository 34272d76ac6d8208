"""Leases of the API server, and how long each has been seen unchanged.

Whether a holder lives is decided by what this process has seen, on its own clock: a holder whose
lease has not changed for the lease's duration is dead. Times that are written in a lease are for
people; clocks of other machines are never compared.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from headrace.kubernetes.api import Api, Json
from headrace.kubernetes.listing import Listing

_KIND_LABEL = "headrace/lease"
_GROUP_LABEL = "headrace/group"
_DRAINING = "headrace/draining"
CONFLICT = 409


class LeaseKind(enum.Enum):
    """What a lease is about."""

    WORKER = "gpuworker"
    SCHEDULER = "scheduler"
    LEADER = "leader"


@dataclass(frozen=True, slots=True)
class Lease:
    """One lease; two are equal when they say the same, however often they were renewed."""

    name: str
    kind: LeaseKind
    holder: str = ""
    transitions: int = 0
    duration_s: int = 10
    is_draining: bool = False
    renewed: str = field(default="", compare=False)
    version: str = field(default="", compare=False)


class Leases:
    """The leases of a group in a namespace."""

    def __init__(self, api: Api, group: str) -> None:
        self._api = api
        self._group = group
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{api.namespace}/leases"

    def listing(self, lasts_s: float) -> Listing[Lease]:
        """All of them; lasts_s: how long a watch lasts."""
        return Listing(self._api, self._path, f"{_GROUP_LABEL}={self._group}", _read, lasts_s)

    async def write(self, lease: Lease) -> Lease:
        """Write a lease: a new one if it has no version, else over exactly that version.

        Raises:
            ApiError: among others CONFLICT, when somebody else has written it in the meantime.
        """
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body: Json = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": lease.name,
                "labels": {_KIND_LABEL: lease.kind.value, _GROUP_LABEL: self._group},
                "annotations": {_DRAINING: "true"} if lease.is_draining else {},
            },
            "spec": {
                "holderIdentity": lease.holder,
                "leaseTransitions": lease.transitions,
                "leaseDurationSeconds": lease.duration_s,
                "renewTime": now,
            },
        }
        if lease.version:
            body["metadata"]["resourceVersion"] = lease.version
            answer = await self._api.call("PUT", f"{self._path}/{lease.name}", body=body)
        else:
            answer = await self._api.call("POST", self._path, body=body)
        written = _read(answer)
        assert written is not None, "it has our labels"
        return written


def _read(item: Json) -> Lease | None:
    metadata, spec = item["metadata"], item.get("spec", {})
    try:
        kind = LeaseKind(metadata.get("labels", {}).get(_KIND_LABEL))
    except ValueError:
        return None
    return Lease(
        name=metadata["name"],
        kind=kind,
        holder=spec.get("holderIdentity") or "",
        transitions=spec.get("leaseTransitions") or 0,
        duration_s=spec.get("leaseDurationSeconds") or 10,
        is_draining=metadata.get("annotations", {}).get(_DRAINING) == "true",
        renewed=spec.get("renewTime") or "",
        version=metadata["resourceVersion"],
    )


class Sightings:
    """Since when each lease has been seen unchanged.

    A time in which nothing could be seen (the API server was away, or this process was stopped)
    does not count: after it, every holder has the whole duration to renew again.
    """

    def __init__(self) -> None:
        self._seen: dict[str, tuple[str, str, float]] = {}
        self._last_s = float("-inf")

    def observe(self, asked_s: float, leases: Iterable[Lease]) -> frozenset[str]:
        """Note what a list said that was asked for at asked_s; the names of live leases.

        A live lease has a holder, and has changed within its duration.
        """
        gap_s = asked_s - self._last_s
        self._last_s = asked_s
        seen = {}
        live = set()
        for lease in leases:
            holder, renewed, since_s = self._seen.get(lease.name, ("", "", asked_s))
            is_unseen = gap_s > lease.duration_s / 2
            if is_unseen or (holder, renewed) != (lease.holder, lease.renewed):
                since_s = asked_s
            seen[lease.name] = (lease.holder, lease.renewed, since_s)
            if lease.holder and asked_s - since_s < lease.duration_s:
                live.add(lease.name)
        self._seen = seen
        return frozenset(live)
