"""The bearer token of a port, checked before a call's method is looked up or its request read."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from headrace.service.errors import map_errors, unauthenticated
from headrace.service.handlers import make_handler


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the token; outermost. Health stays open, for probes."""

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
        # Takes as long for a token that is nearly right.
        if hmac.compare_digest(raw, self._expected):
            return await continuation(handler_call_details)
        return self._refusal


def is_health(method: str) -> bool:
    """Whether it is one of grpc.health.v1, which needs no token."""
    return method.startswith("/grpc.health.v1.Health/")


async def _refuse(_context: Any) -> None:
    raise unauthenticated(
        "BAD_TOKEN", "send metadata `authorization: Bearer TOKEN` with this server's token"
    )
