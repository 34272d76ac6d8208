"""Checks the bearer token of a call before its method is looked up and its request is read."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from headrace.service.errors import map_errors, unauthenticated
from headrace.service.handlers import make_handler


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, except health checks. The outermost interceptor."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()
        self._refusal = map_errors(make_handler(_refuse, has_response_stream=True), "the call")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        if is_health(handler_call_details.method):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata or ())
        sent = metadata.get("authorization", "")
        raw = sent if isinstance(sent, bytes) else sent.encode()
        # In constant time: the time taken must not tell how much of a guess is right.
        if hmac.compare_digest(raw, self._expected):
            return await continuation(handler_call_details)
        return self._refusal


def is_health(method: str) -> bool:
    """Whether the method is a health check, which needs no token."""
    return method.startswith("/grpc.health.v1.Health/")


async def _refuse(_messages: Any, _context: Any) -> None:
    raise unauthenticated(
        "BAD_TOKEN", "send metadata `authorization: Bearer TOKEN` with this server's token"
    )
