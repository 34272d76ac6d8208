"""Metrics of the status store, as each service that writes to the store has them."""

from collections.abc import Iterator

from headrace.service.metrics import Metric, Reading, counter, gauge
from headrace.status.store import StatusStore

LAG = gauge("headrace.store.lag", "s", "How long the oldest item that is not written has waited.")
WAITING = gauge(
    "headrace.store.waiting", "{request}", "Completions with something that is not written yet."
)
REFUSED = counter(
    "headrace.store.refused",
    "{item}",
    "Items that the store refused, or that were dropped while the store was away.",
)
DURABLE = gauge(
    "headrace.store.durable", "1", "1 if recent changes have reached the store, else 0."
)
METRICS: tuple[Metric, ...] = (LAG, WAITING, REFUSED, DURABLE)


def read(store: StatusStore) -> Iterator[Reading]:
    """Every metric of the store; none without a store."""
    if store.is_configured:
        yield LAG, {(): store.lag_s}
        yield WAITING, {(): store.num_waiting}
        yield REFUSED, {(): store.num_refused}
        yield DURABLE, {(): int(store.is_durable)}
