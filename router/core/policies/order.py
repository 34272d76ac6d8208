"""What a policy decides about the requests that wait for one model."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from router.core.admission import QueueLoad

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class QueueEntry(Generic[T]):
    """A request that waits for a model.

    key is unique among the requests that wait; arrival is in seconds, and order, a number that only
    grows, breaks its ties. num_tokens are those of the prompt.
    """

    key: int
    model: str
    order: int
    arrival: float
    num_tokens: int
    priority: int
    tenant: str
    item: T


class Order(Protocol):
    """Ranks waiting requests; holds no requests itself.

    takes_turns: tenants take turns by the service they got; ranks then order within a tenant.
    """

    takes_turns: bool = False

    def rank(self, entry: QueueEntry[T]) -> float:
        """The request with the smallest rank is next; of equal ranks the first to arrive."""
        ...

    def urgency(self, _priority: int, _waited_s: float, /) -> int | None:
        """The priority of a request that has waited so long, as sent to schedulers.

        None: the priority does not count between tenants, and is sent as the client gave it.
        """
        return None

    def tokens_ahead(self, load: QueueLoad, _tenant_load: QueueLoad, _num_tenants: int, /) -> int:
        """Prompt tokens served before a new request of a tenant, at most; 0 if that is unknown.

        load and num_tenants count all waiting requests, tenant_load the tenant's.
        """
        return load.num_tokens
