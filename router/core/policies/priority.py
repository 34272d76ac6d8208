"""The smaller priority first, with aging."""

from router.core.admission import QueueLoad
from router.core.policies.order import Order, QueueEntry, T

_MIN_PRIORITY = -(2**31)


class PriorityOrder(Order):
    """By priority, then by arrival.

    With aging, a priority is worth aging_s seconds of waiting: a request is overtaken only by
    requests that arrive within (difference of priorities) * aging_s after it, so none starves.
    """

    def __init__(self, aging_s: float) -> None:
        """aging_s 0: no aging."""
        self._aging_s = aging_s

    def rank(self, entry: QueueEntry[T]) -> float:
        """The priority; with aging, the time at which a request of priority 0 would rank equal."""
        if self._aging_s:
            return entry.arrival + entry.priority * self._aging_s
        return float(entry.priority)

    def urgency(self, priority: int, waited_s: float, /) -> int | None:
        """The priority, minus one for each aging_s of waiting."""
        aged = int(waited_s / self._aging_s) if self._aging_s else 0
        return max(_MIN_PRIORITY, priority - aged)

    def tokens_ahead(self, _load: QueueLoad, _tenant_load: QueueLoad, _num_tenants: int, /) -> int:
        """Unknown: more urgent requests may arrive."""
        return 0
