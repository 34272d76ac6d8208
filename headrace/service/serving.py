"""The gRPC server of every service: health, reflection, TLS, token, errors, limits."""

import asyncio
import resource
import signal
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any

import grpc
import grpc.aio
import msgspec
from grpc_reflection.v1alpha import reflection

from headrace.service import health
from headrace.service.auth import AuthInterceptor
from headrace.service.call_metrics import CallMeter
from headrace.service.config import ConfigError, help_text
from headrace.service.errors import map_errors
from headrace.service.handlers import HandlerInterceptor
from headrace.service.keys import watch_keys
from headrace.service.requests import RequestReader
from headrace.service.tls import read_authorities, read_pair
from headrace.service.watched import Watched

_MAX_PORT = 65_535
# Clients behind gateways ping once a second during a long prefill, in which nothing is sent. A
# connection is closed after a hundred pings that each come sooner than half a second after the
# last, with nothing sent between.
_PINGS = (
    ("grpc.http2.max_ping_strikes", 100),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
)
# Limits for connections that finish no handshake, answer no ping, or carry no call.
_HANDSHAKE_MS = 10_000
_PING_MS, _PONG_MS = 60_000, 20_000
_MAX_IDLE_MS = 300_000
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ServingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a service listens."""

    listen: Annotated[
        str,
        help_text(
            "host:port to listen on (port 0 takes a free one), or unix:PATH, which is never TLS:"
            " the permissions of its folder protect it."
        ),
    ] = "127.0.0.1:0"
    tls_cert_file: Annotated[
        str,
        help_text(
            "PEM certificate; with a key, the port is TLS. New connections get what is in the files"
            " by then, without a restart."
        ),
    ] = ""
    tls_key_file: Annotated[str, help_text("PEM private key of the certificate.")] = ""
    tls_client_ca_file: Annotated[
        str, help_text("PEM authorities; callers must then show a certificate of theirs (mTLS).")
    ] = ""
    auth_token_file: Annotated[
        str,
        help_text(
            "File with a token that may do everything; callers send it as `authorization: Bearer`."
            " Of several lines, each is accepted. A change of the file counts at once."
        ),
    ] = ""
    api_keys_file: Annotated[
        str,
        help_text(
            "TOML file with hashes of the keys that callers may send instead, as `headrace keys`"
            " makes it. A change of the file counts at once."
        ),
    ] = ""
    max_message_bytes: Annotated[
        int, help_text("Largest message taken; a router's default is 5 MiB.", ge=1)
    ] = 16 * 1024 * 1024
    max_metadata_bytes: Annotated[
        int, help_text("Most metadata of a call, names and values.", ge=1024)
    ] = 8192
    max_connections: Annotated[
        int,
        help_text(
            "Connections at a time, at most half of the open files that the process may have;"
            " more are closed at once.",
            ge=1,
        ),
    ] = 4096
    max_streams_per_connection: Annotated[
        int, help_text("Calls at a time on one connection; more wait or are refused.", ge=1)
    ] = 4096
    drain_timeout_s: Annotated[float, help_text("Time to finish work after SIGTERM.", ge=0)] = 30.0


class GrpcServer:
    """Owns one grpc.aio server. Add servicers to `server` before `start`.

    `meter` counts the calls that are refused before a servicer sees them.
    """

    def __init__(
        self,
        config: ServingConfig,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        *,
        tenant_methods: Collection[str] = (),
    ) -> None:
        """
        Args:
            service_names: full names, e.g. "headrace.v1.Inference".
            tenant_methods: what a tenant's key may call (see AuthInterceptor).
        """
        self._config = config
        self.meter = CallMeter()
        # Outermost first.
        keys = watch_keys(config.auth_token_file, config.api_keys_file)
        chain = [
            AuthInterceptor(keys, tenant_methods, meter=self.meter),
            *interceptors,
            HandlerInterceptor(RequestReader(self.meter).wrap, map_errors),
        ]
        self.server = grpc.aio.server(
            interceptors=chain,
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # Two processes must not listen on one port.
                ("grpc.so_reuseport", 0),
                *_PINGS,
                *_hostile_peers(config),
            ],
        )
        names = (*service_names, health.FULL_NAME, reflection.SERVICE_NAME)
        self._health = health.Health(names)
        self._health.add_to(self.server)
        reflection.enable_server_reflection(names, self.server)

    async def start(self) -> str:
        """Listen; returns the bound "host:port". Health says NOT_SERVING until told otherwise."""
        listen = self._config.listen
        port_text = listen.rpartition(":")[2]
        # gRPC takes a larger port modulo 65536.
        if not listen.startswith("unix:") and not (
            port_text.isdecimal() and int(port_text) <= _MAX_PORT
        ):
            raise ConfigError(f"listen: must be host:port with a port up to 65535, is {listen!r}")
        credentials = self._credentials()
        try:
            if credentials is None:
                port = self.server.add_insecure_port(listen)
            else:
                port = self.server.add_secure_port(listen, credentials)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {listen}: is the port taken? ({error})") from error
        await self.server.start()
        if listen.startswith("unix:"):
            return listen
        return f"{listen.rpartition(':')[0]}:{port}"

    def is_serving(self) -> bool:
        """The status that health checks report."""
        return self._health.is_serving

    def set_serving(self, is_serving: bool) -> None:
        """Sets the status that health checks report."""
        self._health.set_serving(is_serving)

    async def follow(self, waits_s: Callable[[], float], limit_s: float) -> None:
        """Health checks report serving, but while work waits too long (see Health.follow)."""
        await self._health.follow(waits_s, limit_s)

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give live ones grace_s seconds, then cancel them."""
        await self.server.stop(grace_s)

    def _credentials(self) -> grpc.ServerCredentials | None:
        config = self._config
        if config.listen.startswith("unix:"):
            return None
        if not config.tls_cert_file and not config.tls_key_file:
            if config.tls_client_ca_file:
                raise ConfigError("tls_client_ca_file needs tls_cert_file and tls_key_file")
            return None
        return _tls_credentials(
            config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file
        )


def _tls_credentials(cert_file: str, key_file: str, client_ca_file: str) -> grpc.ServerCredentials:
    """What each new connection is offered: the certificate that is in the files by then."""

    def read() -> Any:
        cert, key = read_pair(cert_file, key_file)
        authorities = read_authorities(client_ca_file) if client_ca_file else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], authorities)

    files = Watched([cert_file, key_file, client_ca_file], read)
    given = files.get()

    def renew() -> Any:
        """The files' certificate, if it is another one; gRPC calls this from its own threads."""
        nonlocal given
        before, given = given, files.get()
        return None if given is before else given

    return grpc.dynamic_ssl_server_credentials(
        given, renew, require_client_authentication=bool(client_ca_file)
    )


def _hostile_peers(config: ServingConfig) -> tuple[tuple[str, int], ...]:
    """Options that bound the cost of idle, slow and greedy connections."""
    # Half of the descriptors are kept for files and for connections to other services.
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", _PING_MS),
        ("grpc.keepalive_timeout_ms", _PONG_MS),
        ("grpc.http2.ping_timeout_ms", _PONG_MS),
        ("grpc.max_connection_idle_ms", _MAX_IDLE_MS),
        ("grpc.max_allowed_incoming_connections", min(config.max_connections, num_files // 2)),
        ("grpc.max_concurrent_streams", config.max_streams_per_connection),
        # Between the two, gRPC refuses some calls and not others.
        ("grpc.max_metadata_size", config.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", config.max_metadata_bytes),
        # With the probe the window of a stream grows to megabytes before its request is read.
        ("grpc.http2.bdp_probe", 0),
    )


def stop_asked() -> asyncio.Event:
    """An event that the first SIGTERM or SIGINT sets; a second signal ends the process at once.

    Call it before the address is published: until then a signal ends the process at once.
    """
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def ask() -> None:
        for number in _STOP_SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
        asked.set()

    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, ask)
    return asked
