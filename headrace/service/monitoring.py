"""Publishes a service's metrics: on its admin port, and to an OTLP collector."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from headrace.service import telemetry
from headrace.service.admin import AdminConfig, AdminServer, Site
from headrace.service.metrics import Source

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource

logger = logging.getLogger(__name__)

_INTERVAL_VARIABLE = "OTEL_METRIC_EXPORT_INTERVAL"
_DEFAULT_INTERVAL_MS = "60000"


@contextlib.asynccontextmanager
async def publish_metrics(
    service_name: str,
    source: Source,
    *,
    admin: AdminConfig,
    otlp_endpoint: str,
    is_ready: Callable[[], bool],
    site: Site | None = None,
) -> AsyncIterator[None]:
    """Publish metrics inside the block, where settings ask for it; else this does nothing.

    Args:
        service_name: `service.name` of the metrics that are sent.
        source: reads all metrics; called on the event loop.
        admin: settings of the admin port.
        otlp_endpoint: as in `telemetry.setup`.
        is_ready: what /readyz says.
        site: more pages of the admin port.

    Raises:
        ConfigError: a setting is wrong.
    """
    endpoint = telemetry.endpoint_for("METRICS", otlp_endpoint)
    server = AdminServer(admin, source, is_ready, site) if admin.listen else None
    async with contextlib.AsyncExitStack() as stack:
        if server is not None:
            stack.push_async_callback(server.stop)
            logger.info("admin port: %s", await server.start())
        if endpoint:
            sender = _OtlpSender(telemetry.resource_of(service_name), endpoint, source)
            sending = asyncio.create_task(sender.run(), name="send metrics")
            stack.push_async_callback(_end, sending, sender)
        yield


async def _end(sending: "asyncio.Task[None]", sender: "_OtlpSender") -> None:
    """Stops sending, after what is counted last."""
    sending.cancel()
    await asyncio.wait([sending])
    await sender.send()
    await asyncio.to_thread(sender.close)


class _OtlpSender:
    """Sends all metrics every OTEL_METRIC_EXPORT_INTERVAL milliseconds."""

    def __init__(self, resource: "Resource", endpoint: str, source: Source) -> None:
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

        self._resource = resource
        self._source = source
        self._started_unix_ns = time.time_ns()
        self._interval_s = int(os.environ.get(_INTERVAL_VARIABLE, _DEFAULT_INTERVAL_MS)) / 1000
        self._exporter: Any = OTLPMetricExporter(
            endpoint=endpoint, timeout=telemetry.EXPORT_TIMEOUT_S
        )

    async def run(self) -> None:
        """Sends until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.send()

    async def send(self) -> None:
        """Reads everything now; encoding and sending, which can wait, are another thread's."""
        readings = list(self._source())
        await asyncio.to_thread(self._export, readings)

    def close(self) -> None:
        """Closes the connection. Blocks."""
        self._exporter.shutdown()

    def _export(self, readings: Any) -> None:
        from headrace.service.exposition import metrics_data

        try:
            self._exporter.export(metrics_data(readings, self._resource, self._started_unix_ns))
        except Exception:
            logger.exception("cannot send metrics")
