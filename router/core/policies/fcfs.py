"""First come, first served."""

from router.core.admission import QueueLoad
from router.core.policies.order import QueueEntry, T


class FcfsOrder:
    """By arrival; priorities do not count."""

    takes_turns = False

    def rank(self, _entry: QueueEntry[T]) -> float:
        """The same for all requests, so that the arrival time decides."""
        return 0.0

    def urgency(self, _priority: int, _waited_s: float) -> int | None:
        """Priorities do not count."""
        return None

    def tokens_ahead(self, load: QueueLoad, _tenant_load: QueueLoad, _num_tenants: int) -> int:
        """All waiting prompt tokens."""
        return load.num_tokens
