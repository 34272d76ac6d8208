"""The admin port: /metrics for Prometheus, /healthz and /readyz for probes, over HTTP; and a site.

Off unless an address is given. On the loopback interface the port is open to the machine's users;
on any other it wants a token for everything but the two probes, unless the settings say that
strangers may read. Prometheus can have a token of its own, which opens /metrics only.
"""

import asyncio
import hmac
import ipaddress
import os
import ssl
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from headrace.service.config import ConfigError, help_text
from headrace.service.keys import KeyRing
from headrace.service.metrics import Source
from headrace.service.tls import read_pair, read_tokens
from headrace.service.watched import Watched

if TYPE_CHECKING:
    from aiohttp import web

_OPEN_PATHS = frozenset({"/healthz", "/readyz"})
_SHARED_PATHS = _OPEN_PATHS | {"/metrics"}
_STOP_S = 1.0


class AdminConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP port for metrics and probes."""

    listen: Annotated[
        str,
        help_text(
            "host:port of the admin port, which serves /metrics, /healthz and /readyz over HTTP,"
            " and a router's console; empty: none."
        ),
    ] = ""
    auth_token_file: Annotated[
        str,
        help_text(
            "File with a token that callers must send as `authorization: Bearer`, but for /healthz"
            " and /readyz; the console asks for it. Needed where other machines reach the port."
        ),
    ] = ""
    metrics_token_file: Annotated[
        str,
        help_text(
            "File with another token, which may read /metrics and nothing else, for Prometheus."
            " Given alone, it closes all other pages but the probes."
        ),
    ] = ""
    allow_strangers: Annotated[
        bool,
        help_text("Let other machines read the admin port without a token."),
    ] = False
    tls_cert_file: Annotated[str, help_text("PEM certificate; with a key, the port is HTTPS.")] = ""
    tls_key_file: Annotated[str, help_text("PEM private key of the certificate.")] = ""
    address_file: Annotated[str, help_text("Write the port's URL to this file once listening.")] = (
        ""
    )


class Site(Protocol):
    """More pages of the port, for people."""

    @property
    def open_paths(self) -> Collection[str]:
        """What everybody may read: files that are the same on every machine."""

    @property
    def keys(self) -> Watched[KeyRing] | None:
        """The keys whose administrators may read the other pages; None: no key is needed."""

    def add_to(self, app: "web.Application") -> None:
        """Add the pages."""


class AdminServer:
    """Serves the admin port on the event loop; `start` and `stop` once each."""

    def __init__(
        self,
        config: AdminConfig,
        source: Source,
        is_ready: Callable[[], bool],
        site: Site | None = None,
    ) -> None:
        """source is read at each scrape; is_ready: what /readyz says.

        Raises:
            ConfigError: a setting is wrong, or the port would be open to other machines.
        """
        self._config = config
        self._source = source
        self._is_ready = is_ready
        self._site = site
        self._open_paths = _OPEN_PATHS.union(site.open_paths if site is not None else ())
        self._host, self._port = _split(config.listen)
        self._is_local = _is_loopback(self._host)
        has_token = bool(config.auth_token_file or config.metrics_token_file)
        if not (self._is_local or has_token or config.allow_strangers):
            raise ConfigError(
                f"admin listen: other machines reach {config.listen}; give auth_token_file, or set"
                " allow_strangers where the network keeps them out, or listen on 127.0.0.1"
            )
        # Tokens that open every page, and tokens that open /metrics only.
        self._tokens = _tokens_in(config.auth_token_file)
        self._metrics_tokens = _tokens_in(config.metrics_token_file)
        self._tls = _tls(config)
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Listen; returns the URL."""
        from aiohttp import web

        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[guard])
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        if self._site is not None:
            self._site.add_to(app)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_STOP_S)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(
                f"admin listen: cannot listen on {self._config.listen}: {error.strerror}"
            ) from error
        port = self._runner.addresses[0][1]
        host = f"[{self._host}]" if ":" in self._host else self._host
        url = f"{'http' if self._tls is None else 'https'}://{host}:{port}"
        self._publish(url)
        return url

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _publish(self, url: str) -> None:
        if self._config.address_file:
            file = Path(self._config.address_file)
            draft = file.with_name(f".{file.name}.{os.getpid()}")
            draft.write_text(url, encoding="utf-8")
            draft.replace(file)

    async def _guard(self, request: "web.Request", handler: Any) -> "web.StreamResponse":
        """Refuses callers without the token, and pages of other sites in a local browser."""
        from aiohttp import web

        if request.path not in self._open_paths:
            if not self._may_read(request):
                raise web.HTTPUnauthorized(
                    text="send `authorization: Bearer TOKEN` with this port's token\n",
                    headers={"www-authenticate": "Bearer"},
                )
            if self._is_local and not _is_loopback(_host_of(request)):
                # A foreign name that was made to point here: the page's script must read nothing.
                raise web.HTTPForbidden(text="call this port by its address, or as localhost\n")
        answer: web.StreamResponse = await handler(request)
        if not answer.prepared:
            answer.headers["cache-control"] = "no-store"
        return answer

    def _may_read(self, request: "web.Request") -> bool:
        """Whether the port's token opens a page, or of the site a key of the public port."""
        keys = None if self._site is None else self._site.keys
        if keys is None or request.path in _SHARED_PATHS:
            return self._has_token(request)
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        found = keys.get().find(secret.encode()) if scheme == "Bearer" else None
        if found is not None:
            who, key = found
            return who.is_admin and not (key is not None and key.is_expired())
        return self._tokens is not None and self._has_token(request)

    def _has_token(self, request: "web.Request") -> bool:
        if self._tokens is None and self._metrics_tokens is None:
            return True
        opening = [self._tokens, self._metrics_tokens if request.path == "/metrics" else None]
        sent = request.headers.get("authorization", "").encode()
        tokens = [token for found in opening if found is not None for token in found.get()]
        expected = [f"Bearer {token}".encode() for token in tokens]
        # In constant time: the time taken must not tell how much of a guess is right.
        return any(hmac.compare_digest(sent, one) for one in expected)

    async def _metrics(self, _request: "web.Request") -> "web.Response":
        """All metrics as of one moment. Written one by one: tokens must not wait for a scrape."""
        from aiohttp import web

        from headrace.service import exposition

        parts = []
        for reading in list(self._source()):
            parts.append(exposition.text(reading))
            await asyncio.sleep(0)
        return web.Response(body=b"".join(parts), headers={"content-type": exposition.CONTENT_TYPE})

    async def _healthz(self, _request: "web.Request") -> "web.Response":
        """The event loop turns."""
        from aiohttp import web

        return web.Response(text="ok\n")

    async def _readyz(self, _request: "web.Request") -> "web.Response":
        """Whether calls are answered; the same as the gRPC health service says."""
        from aiohttp import web

        if self._is_ready():
            return web.Response(text="ready\n")
        return web.Response(
            status=503, text="not ready: starting, shutting down, or a step hangs\n"
        )


def _tokens_in(file: str) -> Watched[list[str]] | None:
    return Watched([file], lambda: read_tokens(file)) if file else None


def _split(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not (host and port.isdecimal() and int(port) < 65536):
        raise ConfigError(f"admin listen: must be host:port with a port up to 65535, is {listen!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _host_of(request: "web.Request") -> str:
    """The host that the caller asked for, without the port."""
    host = request.headers.get("host", "")
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _tls(config: AdminConfig) -> ssl.SSLContext | None:
    """The certificate as it is in its files when a caller connects."""
    files = (config.tls_cert_file, config.tls_key_file)
    if not any(files):
        return None

    def read() -> ssl.SSLContext:
        read_pair(*files)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*files)
        return context

    watched = Watched(files, read)

    def use_newest(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = watched.get()

    context = watched.get()
    context.sni_callback = use_newest
    return context
