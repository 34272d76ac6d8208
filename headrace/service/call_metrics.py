"""Metrics of a service's port, as every service has them."""

from collections import Counter
from collections.abc import Iterator

from headrace.service.errors import ServiceError
from headrace.service.metrics import Metric, Reading, counter

REFUSED = counter(
    "headrace.calls.refused",
    "{call}",
    "Calls that no method of the service has seen, by the reason that the caller was given: no key"
    " that opens the method, or beyond the limits on what is read at a time.",
    ("reason",),
)
METRICS: tuple[Metric, ...] = (REFUSED,)


class CallMeter:
    """Counts the calls that are refused before the method's own code runs."""

    def __init__(self) -> None:
        self._num_refused: Counter[str] = Counter()

    def refused(self, error: ServiceError) -> None:
        """A call was refused; reasons are those of the code, so they are few."""
        self._num_refused[error.reason] += 1

    def read(self) -> Iterator[Reading]:
        """Every metric now."""
        yield REFUSED, {(reason,): count for reason, count in self._num_refused.items()}
