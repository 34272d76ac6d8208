"""Asks the service at an address for its health: exit code 0 says that it serves.

    python health.py 127.0.0.1:8700 [--tls-dir DIR --server-name NAME]

For exec probes of Kubernetes (the kubelet's gRPC probes do not speak TLS) and for HEALTHCHECK. DIR
holds ca.crt to trust, and tls.crt and tls.key to show where the port asks for a certificate; NAME
is a name in the certificate of the service.
"""

import argparse
import sys
from pathlib import Path

import grpc

_CHECK = "/grpc.health.v1.Health/Check"
# HealthCheckResponse with status SERVING; the generated stubs would take longer to import.
_SERVING = b"\x08\x01"


def open_channel(address: str, tls_dir: Path | None, server_name: str) -> grpc.Channel:
    """A channel with TLS if tls_dir is given."""
    if tls_dir is None:
        return grpc.insecure_channel(address)
    ca, key, cert = ((tls_dir / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    options = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)


def main() -> None:
    """Ask once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--tls-dir", type=Path)
    parser.add_argument("--server-name", default="")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    given = parser.parse_args()
    with open_channel(given.address, given.tls_dir, given.server_name) as channel:
        try:
            answer = channel.unary_unary(_CHECK)(b"", timeout=given.timeout_s, wait_for_ready=True)
        except grpc.RpcError as error:
            sys.exit(f"{given.address}: {error.code().name}: {error.details()}")
    if answer != _SERVING:
        sys.exit(f"{given.address} is not serving")


if __name__ == "__main__":
    main()
