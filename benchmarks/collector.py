"""A collector that drops what it gets, and a Prometheus that forgets what it reads."""

import asyncio
import contextlib
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

_SCRAPE_S = 5.0


class _Traces(trace_service_pb2_grpc.TraceServiceServicer):
    async def Export(self, _request: Any, _context: Any) -> Any:  # noqa: N802 gRPC names it
        return trace_service_pb2.ExportTraceServiceResponse()


class _Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    async def Export(self, _request: Any, _context: Any) -> Any:  # noqa: N802 gRPC names it
        return metrics_service_pb2.ExportMetricsServiceResponse()


async def serve(address_file: Path) -> None:
    """Collects on a free port, and scrapes the admin ports whose URLs are beside the file."""
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(_Metrics(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    draft = address_file.with_suffix(".draft")
    draft.write_text(f"127.0.0.1:{port}")
    draft.replace(address_file)
    while True:
        await asyncio.sleep(_SCRAPE_S)
        await asyncio.to_thread(_scrape, address_file.parent)


def _scrape(folder: Path) -> None:
    for file in folder.glob("*.admin"):
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{file.read_text()}/metrics").read()


@click.command()
@click.option("--address-file", type=click.Path(path_type=Path), required=True)
def main(address_file: Path) -> None:
    """Collect until the end."""
    asyncio.run(serve(address_file))


if __name__ == "__main__":
    main()
