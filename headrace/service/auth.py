"""Finds out who calls, before the call's method is looked up and its request is read."""

from collections.abc import Awaitable, Callable, Collection
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio

from headrace.service.call_metrics import CallMeter
from headrace.service.errors import ServiceError, map_errors, unauthenticated
from headrace.service.handlers import make_handler
from headrace.service.keys import ANYBODY, Caller, KeyRing
from headrace.service.watched import Watched

_SCHEME = b"Bearer "
_REFLECTION = ("/grpc.reflection.v1alpha.", "/grpc.reflection.v1.")

# Without a default: a handler that asks without the interceptor fails.
_caller: ContextVar[Caller] = ContextVar("headrace_caller")


def caller() -> Caller:
    """Whom the call comes from that this task answers."""
    return _caller.get()


def act_as(who: Caller) -> None:
    """Say whom a call comes from that was let in elsewhere; of this task."""
    _caller.set(who)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a key, except health checks. The outermost interceptor."""

    def __init__(
        self,
        keys: Watched[KeyRing] | None,
        tenant_methods: Collection[str] = (),
        *,
        meter: CallMeter,
    ) -> None:
        """
        Args:
            keys: None accepts every call.
            meter: counts refused calls.
            tenant_methods: what a tenant's key may call, e.g. "/headrace.v1.Inference/Generate";
                all other methods but reflection need the key of an administrator.
        """
        self._keys = keys
        self._tenant_methods = frozenset(tenant_methods)
        self._meter = meter

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        if not is_health(method):
            found = self._find(method, handler_call_details.invocation_metadata or ())
            if isinstance(found, ServiceError):
                self._meter.refused(found)
                return _refusing(found)
            _caller.set(found)
        return await continuation(handler_call_details)

    def _find(self, method: str, metadata: Any) -> Caller | ServiceError:
        if self._keys is None:
            return ANYBODY
        sent = [value for name, value in metadata if name == "authorization"]
        if len(sent) != 1:
            # Of two, a proxy may have checked the one that does not count here.
            return _bad_token("exactly once, " if sent else "")
        raw = sent[0] if isinstance(sent[0], bytes) else sent[0].encode()
        found = self._keys.get().find(raw.removeprefix(_SCHEME))
        if found is None or not raw.startswith(_SCHEME):
            return _bad_token("")
        who, key = found
        if key is not None and key.is_expired():
            text = f"the key {who.key_id} has expired, on {key.expires:%Y-%m-%d}; ask for a new one"
            return unauthenticated("EXPIRED_KEY", text)
        if who.is_admin or method in self._tenant_methods or method.startswith(_REFLECTION):
            return who
        return ServiceError(
            grpc.StatusCode.PERMISSION_DENIED,
            "ADMIN_ONLY",
            f"{method.rpartition('/')[2]} needs the key of an administrator;"
            f" the key {who.key_id} is of tenant {who.tenant!r}",
        )


def is_health(method: str) -> bool:
    """Whether the method is a health check, which needs no token."""
    return method.startswith("/grpc.health.v1.Health/")


def _bad_token(how: str) -> ServiceError:
    return unauthenticated(
        "BAD_TOKEN",
        f"send metadata `authorization: Bearer KEY` {how}with a key or token of this server",
    )


def _refusing(error: ServiceError) -> Any:
    """A handler of every method that raises the error."""

    async def refuse(_messages: Any, _context: Any) -> None:
        raise error

    return map_errors(make_handler(refuse, has_response_stream=True), "the call")
