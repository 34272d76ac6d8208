"""Policies: which request is admitted, which loses its blocks, and which may displace another.

A new policy is a class here, with its name in POLICIES and in the two types of names.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

if TYPE_CHECKING:  # they import the names of policies
    from scheduler.core.request import Request
    from scheduler.core.request_table import RequestTable

# The names in settings, and the names in the core.
PolicySetting = Literal["fcfs", "priority"]
PolicyName = Literal["fcfs", "priority", "preemptive_priority"]


class Policy(Protocol):
    """An order of requests.

    name: in settings. displaces: a waiting request may preempt a running request. merges_queues:
    ranks do not depend on `number`, so waiting requests of different queues, and running requests,
    can be compared; otherwise the queues are served one after the other.
    """

    name: str
    displaces: bool
    merges_queues: bool

    def rank(self, request: "Request", number: int, /) -> Any:
        """The sort key of a queue; the smallest rank is first.

        number counts the queued requests, upwards from 1; for requests that are queued at the front
        it is the negative count.
        """

    def victim_position(self, table: "RequestTable") -> int:
        """Position of the running request that loses its blocks when they run out."""

    def may_displace(self, waiting: "Request", running: "Request", /) -> bool:
        """Whether a waiting request may preempt a running one."""


class Fcfs:
    """First come, first served; a preempted request returns to the front."""

    name = "fcfs"
    displaces = False
    merges_queues = False

    def rank(self, _request: "Request", number: int, /) -> Any:
        return number

    def victim_position(self, table: "RequestTable") -> int:
        """The youngest, which has the least to recompute and returns to the front of the queue."""
        return table.num_running - 1

    def may_displace(self, _waiting: "Request", _running: "Request", /) -> bool:
        return False


class Priority:
    """Smallest (priority, arrival_time, request_id) first, wherever a request comes from."""

    name = "priority"
    merges_queues = True

    def __init__(self, *, displaces: bool = False) -> None:
        """displaces: a more urgent waiting request preempts less urgent running requests."""
        self.displaces = displaces

    def rank(self, request: "Request", _number: int, /) -> Any:
        spec = request.spec
        # The key distinguishes two live requests with the same id.
        return (spec.priority, spec.arrival_time, spec.request_id, request.key)

    def victim_position(self, table: "RequestTable") -> int:
        """The greatest (priority, arrival_time); among equals the first in the running order."""
        specs = [table.request(row).spec for row in table.running_rows.tolist()]
        return max(range(len(specs)), key=lambda i: (specs[i].priority, specs[i].arrival_time))

    def may_displace(self, waiting: "Request", running: "Request", /) -> bool:
        """Only a strictly more urgent request: equals would displace each other for ever."""
        return self.displaces and running.spec.priority > waiting.spec.priority


POLICIES: Mapping[PolicyName, Policy] = {
    "fcfs": Fcfs(),
    "priority": Priority(),
    "preemptive_priority": Priority(displaces=True),
}


def policy_name(name: str, *, displaces: bool) -> PolicyName:
    """The core's name of a policy in settings, with or without displacement."""
    variants = {(policy.name, policy.displaces): key for key, policy in POLICIES.items()}
    return variants.get((name, displaces), cast("PolicyName", name))
