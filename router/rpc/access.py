"""What the sender of a call may do: which methods, for which tenant, with which requests.

Inside the services a request that was made with the key of a tenant has the id TENANT/ID. Its
callers send and see ID alone, so the requests of others have ids that they cannot write: all
methods treat them as unknown ids, and two tenants may use one id at a time. Administrators write
TENANT/ID.
"""

import re

import grpc

from headrace.service.auth import caller
from headrace.service.errors import ServiceError, invalid
from headrace.service.keys import Caller
from headrace.v1 import inference_pb2
from router.rpc import explained, wire

FULL_NAME = "headrace.v1.Inference"

_TENANT_METHODS = ("Generate", "Resume", "Abort", "GetStatus", "Explain", "ListModels")
# All others show the whole pool: they are for administrators.
TENANT_METHODS = frozenset(f"/{FULL_NAME}/{name}" for name in _TENANT_METHODS)

# As the scheduler's explanations say whose tokens took the KV blocks.
_PREEMPTED_BY = re.compile(r"^preempted: (\S+) needed ")


class Access:
    """The rights of the sender of the call that this task answers."""

    def __init__(self, who: Caller | None = None) -> None:
        self._who = who or caller()
        self._scope = f"{self._who.tenant}/" if self._who.tenant else ""

    @property
    def who(self) -> Caller:
        """The sender."""
        return self._who

    def inner_id(self, request_id: str, field: str = "request_id") -> str:
        """The id inside the services of a request that the caller names."""
        wire.check_request_id(request_id, field)
        return self._inner(request_id, field)

    def _inner(self, request_id: str, field: str) -> str:
        if self._scope and "/" in request_id:
            raise invalid(field, "must be 1 to 128 characters of A-Z a-z 0-9 . _ : -")
        return self._scope + request_id

    def outer_id(self, request_id: str) -> str:
        """The id that the caller knows a request by."""
        return request_id.removeprefix(self._scope)

    def owns(self, request_id: str) -> bool:
        """Whether the caller may see and end the request of an inner id."""
        return request_id.startswith(self._scope)

    def tenant(self, named: str) -> str:
        """The tenant to act for, where the request names this one; "" stands for the caller's."""
        own = self._who.tenant
        if own and named not in {"", own}:
            raise ServiceError(
                grpc.StatusCode.PERMISSION_DENIED,
                "OTHER_TENANT",
                f"tenant: the key {self._who.key_id} is of tenant {own!r}; leave the field empty",
                field="tenant",
            )
        return own or named

    def enter(self, request: inference_pb2.GenerateRequest) -> str:
        """Checks a new request, fills its tenant in, and returns its inner id."""
        inner = self._inner(wire.request_id_of(request), "request_id")
        scope, slash, _ = inner.rpartition("/")
        if slash and request.tenant not in {"", scope}:
            if self._scope:
                self.tenant(request.tenant)
            raise invalid("tenant", f"must be empty or {scope!r}, as the request_id says")
        if slash:
            request.tenant = scope
        wire.check_tenant(request.tenant)
        least = self._who.limits.min_priority
        if least is not None and request.priority < least:
            raise invalid("priority", f"must be at least {least} with the key {self._who.key_id}")
        return inner

    def explanation(self, found: inference_pb2.ExplainResponse) -> inference_pb2.ExplainResponse:
        """A scheduler's explanation without what the caller must not see."""
        found.request_id = self.outer_id(found.request_id)
        if self._scope:
            for event in found.events:
                event.detail = _PREEMPTED_BY.sub(self._preemption, event.detail)
            explained.hide_tenants(found, self._who.tenant)
        return found

    def _preemption(self, found: re.Match[str]) -> str:
        other = found[1]
        name = self.outer_id(other) if self.owns(other) else "another request"
        return f"preempted: {name} needed "
