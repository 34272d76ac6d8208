"""Connections to the store, by the URL's scheme, with redis-py's own clients.

    redis://[user:password@]host[:port][/db]        one server; rediss:// with TLS
    unix://[user:password@]path[?db=n]              one server on this machine
    redis+sentinel://[user:password@]host[:port],.../MASTER[/db]
    redis+cluster://[user:password@]host[:port],...

Options follow as in redis-py (`?ssl_ca_certs=...`); Sentinel takes `sentinel_username` and
`sentinel_password` of its own. rediss+sentinel:// and rediss+cluster:// use TLS.

No client retries: a retried command can stay with a dead master and be written there later.
`write_behind` retries with a fresh connection.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from hashlib import sha1
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit

import redis.exceptions
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    ClusterCrossSlotError,
    NoPermissionError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
)

from headrace.service.errors import ServiceError, unavailable

logger = logging.getLogger(__name__)

Command = Sequence[Any]

# Never retried: repeated attempts with a wrong password lock the account.
_CREDENTIAL_ERRORS = (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
)
_SENTINEL_PORT, _SERVER_PORT = 26379, 6379
# How long a master is written to before Sentinel is asked again: a master that was cut off, and
# replaced, goes on to accept writes for a while.
_MASTER_CHECK_S = 1.0
# With several hosts, a call may have to find out which of them answer.
_MAX_HOPS = 3


def make_client(url: str, timeout_s: float) -> Redis | RedisCluster:
    """A client that connects at first use; ValueError for a URL that is not understood.

    timeout_s is how long a connection or an answer may take.
    """
    parts = urlsplit(url)
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    match parts.scheme.partition("+")[::2]:
        case ("redis" | "rediss") as scheme, "sentinel":
            return _sentinel_client(parts, options, is_encrypted=scheme == "rediss")
        case ("redis" | "rediss") as scheme, "cluster":
            options |= _login(parts, is_encrypted=scheme == "rediss")
            nodes = [ClusterNode(host, port) for host, port in _hosts(parts, _SERVER_PORT)]
            return RedisCluster(startup_nodes=nodes, **options)
        case (("redis" | "rediss" | "unix"), ""):
            return Redis.from_url(url, **options)
    raise ValueError(
        f"store URL {parts.scheme}://...: give redis://, rediss://, unix://, redis+sentinel:// or"
        " redis+cluster://"
    )


def _sentinel_client(parts: SplitResult, options: dict[str, Any], *, is_encrypted: bool) -> Redis:
    master, _, db = parts.path.removeprefix("/").partition("/")
    if not master or (db and not db.isdecimal()):
        raise ValueError("store URL redis+sentinel://: give .../MASTER or .../MASTER/DB")
    login = _login(parts, is_encrypted=is_encrypted)
    own = {
        name: value
        for name in ("username", "password")
        if (value := login.pop(f"sentinel_{name}", None)) is not None
    }
    tls = {name: value for name, value in login.items() if name.startswith("ssl")}
    sentinel: Any = cast("Any", Sentinel)(
        _hosts(parts, _SENTINEL_PORT), sentinel_kwargs={**options, **tls, **own}
    )
    client: Redis = sentinel.master_for(master, **options, **login, db=int(db or 0))
    return client


def _login(parts: SplitResult, *, is_encrypted: bool) -> dict[str, Any]:
    """User, password and options of a URL with several hosts."""
    user, at_sign, _ = parts.netloc.rpartition("@")
    options: dict[str, Any] = dict(parse_url(f"redis://{user}{at_sign}host?{parts.query}"))
    del options["host"]
    return {**options, "ssl": True} if is_encrypted else options


def _hosts(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    """The hosts of a URL, in order."""
    names = parts.netloc.rpartition("@")[2].split(",")
    hosts = [urlsplit(f"//{name}") for name in names]
    if not all(host.hostname for host in hosts):
        raise ValueError("store URL: give HOST:PORT,HOST:PORT,...")
    return [(str(host.hostname), host.port or default_port) for host in hosts]


class Script:
    """A Lua script, called by its digest."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._digest = sha1(source.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[str], *arguments: bytes | str) -> Command:
        """The command that runs the script; all keys lie in one slot if the store is a cluster."""
        return ("EVALSHA", self._digest, len(keys), *keys, *arguments)


class Connection:
    """Runs commands in the store; owns the client. A command may run twice."""

    def __init__(
        self, url: str, timeout_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """timeout_s is how long one host may take to answer; clock is monotonic seconds."""
        self._client = make_client(url, timeout_s)
        # Whether all keys of a command must lie in one slot.
        self.is_cluster = isinstance(self._client, RedisCluster)
        self._masters = _masters_of(self._client)
        has_hops = self.is_cluster or self._masters is not None
        self._timeout_s = timeout_s * (_MAX_HOPS if has_hops else 1)
        self._clock = clock
        self._checked_at = clock()
        # When a call last failed, on `clock`.
        self.failed_at = -math.inf
        self._scripts: list[Script] = []
        self._has_scripts = False
        self._refusal: ServiceError | None = None

    def add_script(self, source: str) -> Script:
        """A script that commands may call."""
        self._scripts.append(script := Script(source))
        return script

    async def aclose(self) -> None:
        """Closes the client's connections."""
        await self._client.aclose()
        if self._masters is not None:
            await self._masters.sentinel_manager.aclose()

    async def call(self, *commands: Command) -> list[Any]:
        """The answers, in order. Raises ServiceError: STORE_UNAVAILABLE, or STORE_REFUSED when the
        store refuses the credentials, which are not tried again."""
        if self._refusal is not None:
            raise self._refusal
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _cancellable(self._run(commands))
        # OSError: redis-py lets a dying connection's error through unwrapped.
        except (RedisError, OSError) as error:
            self.failed_at = self._clock()
            await self._note(error)
            failure = _as_service_error(error)
            if failure.reason == "STORE_REFUSED":
                logger.error("status store refused us, records are not kept: %s", error)
                self._refusal = failure
            raise failure from error

    async def _run(self, commands: Sequence[Command]) -> list[Any]:
        if self._masters is not None and self._clock() - self._checked_at >= _MASTER_CHECK_S:
            # Closes idle connections if another server is the master now.
            before = self._masters.master_address
            master = await cast("Any", self._masters).get_master_address()
            self._checked_at = self._clock()
            if before not in {None, master}:
                # So that callers write again what the old master may have taken along.
                raise redis.exceptions.ConnectionError(f"the master is at {master} now")
        if not self._has_scripts:
            await self._load_scripts()
        try:
            return await self._send(commands)
        except NoScriptError:
            await self._load_scripts()
            return await self._send(commands)

    async def _load_scripts(self) -> None:
        for script in self._scripts:
            await self._client.script_load(script.source)
        self._has_scripts = True

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        client = cast("Any", self._client)
        if len(commands) == 1:
            return [await client.execute_command(*commands[0])]
        async with client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return cast("list[Any]", await pipe.execute())

    async def _note(self, error: Exception) -> None:
        """Draws conclusions from a failure: who is a cluster, and where to connect next."""
        if isinstance(error, ClusterCrossSlotError):
            # The URL of a single server led to a node of a cluster.
            self.is_cluster = True
        elif isinstance(self._client, RedisCluster):
            # The slots may have moved; the client asks again when it has no connections.
            await self._client.aclose()
        elif isinstance(error, ReadOnlyError):
            # Another server may have this address by now.
            await self._client.connection_pool.disconnect(inuse_connections=False)


async def _cancellable(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """Awaits `work`; raises a cancellation that `work` swallows, as redis-py does when a connection
    dies at the same time."""
    task = asyncio.current_task()
    assert task is not None, "awaited by a task"
    num_cancels = task.cancelling()
    try:
        return await work
    finally:
        if task.cancelling() > num_cancels:
            raise asyncio.CancelledError


def _masters_of(client: Redis | RedisCluster) -> SentinelConnectionPool | None:
    """What asks Sentinel for the master, if the client does."""
    if isinstance(client, Redis) and isinstance(client.connection_pool, SentinelConnectionPool):
        return client.connection_pool
    return None


def _refuses_us(error: Exception) -> bool:
    """Whether credentials caused an error; redis-py wraps errors of new unix connections."""
    if isinstance(error, MasterNotFoundError):
        return "AuthenticationError(" in str(error)
    return isinstance(error, _CREDENTIAL_ERRORS) or isinstance(error.__cause__, _CREDENTIAL_ERRORS)


def _as_service_error(error: Exception) -> ServiceError:
    if _refuses_us(error):
        text = f"the status store refuses our credentials ({error}); correct the store URL"
        return unavailable("STORE_REFUSED", text)
    what = f"{type(error).__name__}: {error}" if str(error) else "no answer in time"
    text = f"the status store cannot be reached ({what}); try again when it is back"
    return unavailable("STORE_UNAVAILABLE", text, retry_after_s=1.0)
