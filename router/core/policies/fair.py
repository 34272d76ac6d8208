"""Tenants take turns by what they were served (see `fairness`); priority inside a tenant."""

from router.core.admission import QueueLoad
from router.core.policies.order import Order, QueueEntry, T
from router.core.policies.priority import PriorityOrder


class FairOrder(Order):
    """Ranks a tenant's own requests by priority."""

    takes_turns = True

    def __init__(self, aging_s: float) -> None:
        """aging_s 0: no aging."""
        self._within_tenant = PriorityOrder(aging_s)

    def rank(self, entry: QueueEntry[T]) -> float:
        """The rank among the requests of the same tenant."""
        return self._within_tenant.rank(entry)

    def tokens_ahead(self, load: QueueLoad, tenant_load: QueueLoad, num_tenants: int, /) -> int:
        """Every waiting tenant gets about one turn for each turn of this tenant."""
        return min(load.num_tokens, tenant_load.num_tokens * max(1, num_tenants))
