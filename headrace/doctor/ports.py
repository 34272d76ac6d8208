"""Whether a gRPC port can be reached, speaks TLS as it should, and takes the key."""

import asyncio
import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
import msgspec
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.doctor.findings import Report
from headrace.service.channels import (
    WANTS_TLS,
    ChannelConfig,
    connect_failure,
    open_channel,
    speaks_tls,
)
from headrace.service.errors import ServiceError, from_rpc_error

TIMEOUT_S = 5.0
_SOON_DAYS = 14
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Port:
    """A service to check: role is router, scheduler or worker; service its full gRPC name."""

    role: str
    address: str
    service: str
    config: ChannelConfig

    @property
    def target(self) -> str:
        """What findings call the port."""
        return f"{self.role} {self.address}"

    @property
    def is_socket(self) -> bool:
        """Whether the port is a socket of this machine."""
        return self.address.startswith("unix:")

    @property
    def host(self) -> str:
        """Without port and brackets."""
        return self.address.rpartition(":")[0].strip("[]")


async def check_port(port: Port, report: Report) -> bool:
    """Checks everything below the service's own methods; whether these can be called."""
    if not port.is_socket and not (await _reaches(port, report) and await _tls(port, report)):
        return False
    return await _health(port, report) and await _key(port, report)


async def ask(port: Port, report: Report, check: str, call: Any) -> Any:
    """A unary call's answer; a finding and None where the service gives none."""
    try:
        return await call
    except grpc.aio.AioRpcError as rpc_error:
        refused(port, report, check, from_rpc_error(rpc_error))
        return None


def refused(port: Port, report: Report, check: str, error: ServiceError) -> None:
    """The finding for a call that failed."""
    if error.code is grpc.StatusCode.PERMISSION_DENIED:
        report.skipped(port.target, check, error.message, "give an administrator's key")
    else:
        text = connect_failure(error.message)
        report.problem(port.target, check, f"{text} [{error.reason}]", "see the service's log")


async def _reaches(port: Port, report: Report) -> bool:
    number = port.address.rpartition(":")[2]
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(port.host, int(number))
        writer.close()
    except ValueError:
        report.problem(port.target, "port", "is not HOST:PORT", "correct the address")
    except socket.gaierror as error:
        text = f"{port.host} has no address ({error.strerror})"
        report.problem(port.target, "port", text, "correct the name, or the DNS")
    except TimeoutError:
        text = f"no answer within {TIMEOUT_S:g} s"
        report.problem(port.target, "port", text, "check network policies and firewalls on the way")
    except OSError as error:
        text = error.strerror or str(error)
        report.problem(port.target, "port", text, "start the service, or correct the address")
    else:
        report.ok(port.target, "port", "reachable")
        return True
    return False


async def _tls(port: Port, report: Report) -> bool:
    config = port.config
    if not config.is_tls:
        if await speaks_tls(port.address):
            report.problem(port.target, "tls", WANTS_TLS, "give --tls-ca-file PEM, or --tls")
            return False
        if _is_loopback(port.host):
            report.ok(port.target, "tls", "plain text, on this machine")
        else:
            advice = "turn TLS on: keys and prompts can be read on the way"
            report.warning(port.target, "tls", "plain text", advice)
        return True
    context = ssl.create_default_context(cafile=config.tls_ca_file or None)
    context.set_alpn_protocols(["h2"])
    if config.tls_cert_file:
        context.load_cert_chain(config.tls_cert_file, config.tls_key_file)
    number = int(port.address.rpartition(":")[2])
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(port.host, number, ssl=context)
    except (OSError, TimeoutError) as error:
        report.problem(port.target, "tls", *_tls_failure(error))
        return False
    certificate = writer.get_extra_info("peercert")
    writer.transport.abort()
    _certificate(port, report, certificate)
    return True


def _tls_failure(error: Exception) -> tuple[str, str]:
    """What failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        text = f"the certificate is refused: {error.verify_message.rstrip('.')}"
        if "expired" in text:
            return text, "renew the server's certificate"
        if "match" in text:
            return text, "call the server by a name in its certificate, or put this name into it"
        return text, "give the authority that signed it: --tls-ca-file PEM"
    if isinstance(error, ssl.SSLError) and "WRONG_VERSION_NUMBER" in str(error.reason):
        return "the port does not speak TLS", "leave the TLS options out, or turn TLS on there"
    return f"the TLS handshake failed: {error}", "see the service's log"


def _certificate(port: Port, report: Report, certificate: dict[str, object]) -> None:
    names = ", ".join(value for _, value in certificate.get("subjectAltName", ()))  # type: ignore[attr-defined]
    left_s = ssl.cert_time_to_seconds(str(certificate["notAfter"])) - time.time()
    text = f"certificate of {names}, valid for {left_s / _DAY_S:.0f} more days"
    if left_s < _SOON_DAYS * _DAY_S:
        advice = "renew it now; services read a renewed certificate without a restart"
        report.warning(port.target, "tls", text, advice)
    else:
        report.ok(port.target, "tls", text)


async def _health(port: Port, report: Report) -> bool:
    async with open_channel(port.address, port.config) as channel:
        request = health_pb2.HealthCheckRequest()
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Check(request, timeout=TIMEOUT_S)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            text = connect_failure(error.details() or error.code().name)
            advice = "check that a Headrace service listens there"
            if port.config.is_tls:
                advice += "; it may want a client certificate: --tls-cert-file, --tls-key-file"
            report.problem(port.target, "health", text, advice)
            return False
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        report.ok(port.target, "health", "serving")
    else:
        advice = "a worker that loads and a service that drains say so; else see its log"
        report.warning(port.target, "health", "not serving", advice)
    return True


async def _key(port: Port, report: Report) -> bool:
    """Calls a method that does not exist: keys are checked before methods are."""
    unkeyed = msgspec.structs.replace(port.config, auth_token_file="")
    error = await _call_nothing(replace(port, config=unkeyed))
    if error.code is not grpc.StatusCode.UNAUTHENTICATED:
        if port.is_socket or _is_loopback(port.host):
            report.ok(port.target, "key", "asks for none, on this machine")
        else:
            advice = "give the service auth_token_file or api_keys_file: everybody may call it"
            report.warning(port.target, "key", "asks for none", advice)
        return True
    if not port.config.auth_token_file:
        advice = "give --auth-token-file FILE, or --scheduler-token-file and --worker-token-file"
        report.problem(port.target, "key", "asks for a key", advice)
        return False
    error = await _call_nothing(port)
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        advice = "give the right key: `headrace keys` makes one"
        report.problem(port.target, "key", f"{error.message} [{error.reason}]", advice)
        return False
    is_tenant = error.code is grpc.StatusCode.PERMISSION_DENIED
    report.ok(port.target, "key", "accepted, as a tenant's" if is_tenant else "accepted")
    return True


async def _call_nothing(port: Port) -> ServiceError:
    async with open_channel(port.address, port.config) as channel:
        method: Any = channel.unary_unary(f"/{port.service}/Nothing")
        try:
            await method(b"", timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
    return ServiceError(grpc.StatusCode.OK, "OK", "")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
