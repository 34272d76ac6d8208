"""Serves grpc.health.v1 without a lock, so that a watcher that does not read blocks no other call.

The servicer of grpcio-health-checking writes to a watcher while holding a lock that every other
watcher and every change of status need.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.service.call_limit import CallLimit
from headrace.service.errors import not_found
from headrace.service.handlers import write

logger = logging.getLogger(__name__)

FULL_NAME = "grpc.health.v1.Health"

# A further watcher ends the oldest: callers need no token, so the number must be bounded.
_MAX_WATCHERS = 256
_FOLLOW_EVERY_S = 0.5

_Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """The health of a port; the same for each of its services, and for the service ""."""

    def __init__(self, service_names: Iterable[str]) -> None:
        self._names = ("", *service_names)
        self.is_serving = False
        self._changed = asyncio.Event()
        self.watchers = CallLimit(_MAX_WATCHERS)

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service."""
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    def set_serving(self, is_serving: bool) -> None:
        """Changes the status and wakes the watchers, without waiting for them."""
        self.is_serving = is_serving
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, waits_s: Callable[[], float], limit_s: float) -> None:
        """Serves from now on, but not while work waits for longer than limit_s; until cancelled.

        waits_s: for how long there has been work of which none got done; 0 while there is none.
        """
        self.set_serving(True)
        while True:
            waited_s = waits_s()
            if (waited_s <= limit_s) != self.is_serving:
                self.set_serving(not self.is_serving)
                if self.is_serving:
                    logger.info("ready again")
                else:
                    logger.warning(
                        "not ready: there is work, and none got done in %.1f s", waited_s
                    )
            await asyncio.sleep(_FOLLOW_EVERY_S)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, _context: Any
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            raise not_found("UNKNOWN_SERVICE", f"service: {request.service!r} is not on this port")
        return self._status

    async def List(self, _request: Any, _context: Any) -> Any:
        make: Any = getattr(health_pb2, "HealthListResponse")  # noqa: B009 its stubs lack it
        return make(statuses=dict.fromkeys(self._names, self._status))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        """Streams the status now and after each change."""
        await self.watchers.run(self._watch(request, context))

    async def _watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:
        unknown = _Status(status=_Status.SERVICE_UNKNOWN)
        is_known = request.service in self._names
        last = None
        while True:
            changed = self._changed
            status = self._status if is_known else unknown
            if status != last:
                await write(context, status)
                last = status
            await changed.wait()

    @property
    def _status(self) -> health_pb2.HealthCheckResponse:
        return _Status(status=_Status.SERVING if self.is_serving else _Status.NOT_SERVING)
