"""The policies that order waiting requests, by the names that settings use.

A new policy is one file here and its line in this table.
"""

from collections.abc import Callable, Mapping
from typing import Literal

from router.core.policies.fair import FairOrder
from router.core.policies.fcfs import FcfsOrder
from router.core.policies.order import Order
from router.core.policies.priority import PriorityOrder

OrderName = Literal["fcfs", "priority", "fair"]

_ORDER_BY_NAME: Mapping[OrderName, Callable[[float], Order]] = {
    "fcfs": lambda _: FcfsOrder(),
    "priority": PriorityOrder,
    "fair": FairOrder,
}


def make_order(policy: OrderName, *, aging_s: float = 0.0) -> Order:
    """The order of a policy; aging_s is the waiting time that one priority is worth, 0: none."""
    return _ORDER_BY_NAME[policy](aging_s)
