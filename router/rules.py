"""The router's rules as plain values: limits of requests and tenants, and the order of dispatch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.core.admission import Limits, TenantLimits
from router.core.fairness import FairShare
from router.core.model_queue import ModelQueue
from router.core.pauses import UnreadLimits
from router.core.policies import OrderName, make_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """tenant_limits hold for each tenant that has none in limits_by_tenant."""

    limits: Limits = field(default_factory=Limits)
    tenant_limits: TenantLimits = field(default_factory=TenantLimits)
    limits_by_tenant: Mapping[str, TenantLimits] = field(default_factory=dict)
    policy: OrderName = "fair"
    priority_aging_s: float = 60.0
    output_price: float = 2.0
    unread: UnreadLimits = field(default_factory=UnreadLimits)
    share_prefix_cache_across_tenants: bool = False
    orphan_ttl_s: float = 60.0

    def make_model_queue(self) -> ModelQueue[Any]:
        """An empty queue for the requests of one model."""
        shares = FairShare(
            {tenant: limits.weight for tenant, limits in self.limits_by_tenant.items()},
            default_weight=self.tenant_limits.weight,
            output_price=self.output_price,
        )
        return ModelQueue(make_order(self.policy, aging_s=self.priority_aging_s), shares)
