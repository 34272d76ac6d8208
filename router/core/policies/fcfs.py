"""First come, first served."""

from router.core.policies.order import Order, QueueEntry, T


class FcfsOrder(Order):
    """By arrival; priorities do not count."""

    def rank(self, _entry: QueueEntry[T]) -> float:
        """The same for all requests, so that the arrival time decides."""
        return 0.0
