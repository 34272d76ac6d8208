"""Opens channels to services, with TLS, bearer token and keepalive."""

import asyncio
import re
import ssl
from typing import Annotated, Any

import grpc
import grpc.aio
import msgspec

from headrace.service.config import help_text
from headrace.service.renewal import RenewedChannel
from headrace.service.tls import read_authorities, read_pair, read_tokens
from headrace.service.watched import Watched

_CONNECT_NOISE = re.compile(
    r"^failed to connect to all addresses; last error: [A-Z_]+: (?:(?:ipv[46]|unix):\S+: )?"
    r"(?:Failed to connect to remote host: )?"
)


# What gRPC's messages contain, and what they mean.
_CLEAR = {
    "WRONG_VERSION_NUMBER": "the port does not speak TLS: leave the TLS options out",
    "certificate has expired": "the server's certificate has expired: renew it there",
    "certificate is not yet valid": "the server's certificate is not valid yet: check both clocks",
    "Hostname Verification": (
        "the server's certificate is of another name: call the server by a name in it, or renew it"
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        "the server's certificate is not signed by an authority that is trusted here:"
        " give the right tls_ca_file"
    ),
}
WANTS_TLS = "the port speaks TLS: give tls_ca_file"
_PROBE_S = 2.0


class ChannelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to reach a service."""

    tls: Annotated[bool, help_text("Use TLS; with no authority file, the system's.")] = False
    tls_ca_file: Annotated[str, help_text("PEM authorities to trust; turns TLS on.")] = ""
    tls_cert_file: Annotated[str, help_text("PEM certificate to show (mTLS).")] = ""
    tls_key_file: Annotated[str, help_text("PEM private key of that certificate.")] = ""
    auth_token_file: Annotated[
        str,
        help_text(
            "File with the bearer token or API key to send, in its first line. A change of the file"
            " counts at once."
        ),
    ] = ""
    max_message_bytes: Annotated[int, help_text("Largest message taken.", ge=1)] = 16 * 1024 * 1024

    @property
    def is_tls(self) -> bool:
        """Whether connections other than to a socket are TLS."""
        return bool(self.tls or self.tls_ca_file or self.tls_cert_file or self.tls_key_file)


class _Token:
    """Adds the token to a call; grpc.aio wants an interceptor class for each kind of call."""

    def __init__(self, token: Watched[str]) -> None:
        self._token = token

    async def intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        metadata = grpc.aio.Metadata(*(details.metadata or ()))
        metadata.add("authorization", f"Bearer {self._token.get()}")
        details = grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )
        return await continuation(details, request)


class _TokenUnary(_Token, grpc.aio.UnaryUnaryClientInterceptor):
    intercept_unary_unary: Any = _Token.intercept


class _TokenServerStream(_Token, grpc.aio.UnaryStreamClientInterceptor):
    intercept_unary_stream: Any = _Token.intercept


class _TokenBidi:
    """A bidirectional method that sends the token.

    An interceptor would put a queue and a task between the caller's writes and the call, and leave
    both pending for good when the call fails.
    """

    def __init__(self, method: Any, token: Watched[str]) -> None:
        self._method = method
        self._token = token

    def __call__(self, *arguments: Any, metadata: Any = None, **named: Any) -> Any:
        sent = (*(metadata or ()), ("authorization", f"Bearer {self._token.get()}"))
        return self._method(*arguments, metadata=sent, **named)


def open_channel(
    target: str, config: ChannelConfig | None = None, *, tls_name: str = ""
) -> grpc.aio.Channel:
    """A channel to "host:port" or unix:PATH; the caller closes the channel.

    tls_name: what the certificate must certify; empty: the target's host.
    """
    config = config or ChannelConfig()
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Reconnects to a restarted peer within two seconds.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    if tls_name:
        options.append(("grpc.ssl_target_name_override", tls_name))
    interceptors: list[grpc.aio.ClientInterceptor] = []
    if config.auth_token_file:
        token = Watched([config.auth_token_file], lambda: read_tokens(config.auth_token_file)[0])
        interceptors = [_TokenUnary(token), _TokenServerStream(token)]
    # A socket has no name that a certificate could certify.
    if not config.is_tls or target.startswith("unix:"):
        channel = grpc.aio.insecure_channel(target, options=options, interceptors=interceptors)
    else:
        files = [config.tls_ca_file, config.tls_cert_file, config.tls_key_file]
        channel = RenewedChannel(
            Watched(files, lambda: _credentials(config)),
            lambda found: grpc.aio.secure_channel(
                target, found, options=options, interceptors=interceptors
            ),
        )
    if config.auth_token_file:
        make = channel.stream_stream
        opened: Any = channel
        opened.stream_stream = lambda *given, **named: _TokenBidi(make(*given, **named), token)
    return channel


def _credentials(config: ChannelConfig) -> grpc.ChannelCredentials:
    has_pair = bool(config.tls_cert_file or config.tls_key_file)
    cert, key = read_pair(config.tls_cert_file, config.tls_key_file) if has_pair else (None, None)
    authorities = read_authorities(config.tls_ca_file) if config.tls_ca_file else None
    return grpc.ssl_channel_credentials(authorities, key, cert)


def connect_failure(details: str) -> str:
    """The cause in gRPC's message about a failed connection, without the address."""
    why = _CONNECT_NOISE.sub("", details)
    return next((clear for sign, clear in _CLEAR.items() if sign in why), why)


async def speaks_tls(target: str) -> bool:
    """Whether a port answers a TLS handshake; False when it cannot be reached, or is a socket."""
    host, _, port = target.rpartition(":")
    if target.startswith("unix:") or not port.isdecimal():
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Only whether it is TLS is asked; nothing is sent.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, TimeoutError) as error:
        # An alert of the other side is TLS, too.
        return isinstance(error, ssl.SSLError) and "ALERT" in str(error.reason).upper()
    writer.transport.abort()
    return True


def has_never_connected(details: str) -> bool:
    """Whether gRPC's message says that there was no connection, so that nothing was sent."""
    return details.startswith(("failed to connect to all addresses", "DNS resolution failed"))
