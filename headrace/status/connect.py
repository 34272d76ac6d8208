"""Connections to the store, by the URL's scheme, with redis-py's own clients.

No client retries: a retried command can stay with a dead master and be written there later.
`write_behind` retries with a fresh connection.
"""

import asyncio
import logging
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, cast

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    ClusterCrossSlotError,
    NoPermissionError,
    NoScriptError,
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


def make_client(url: str, timeout_s: float) -> redis.asyncio.Redis:
    """A client that connects at first use; ValueError for a URL that is not understood."""
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


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

    def __init__(self, url: str, timeout_s: float) -> None:
        self._client = make_client(url, timeout_s)
        self._timeout_s = timeout_s
        self._scripts: list[Script] = []
        self._refusal: ServiceError | None = None
        # Whether all keys of a command must lie in one slot.
        self.is_cluster = False

    def add_script(self, source: str) -> Script:
        """A script that commands may call."""
        self._scripts.append(script := Script(source))
        return script

    async def aclose(self) -> None:
        """Closes the client's connections."""
        await self._client.aclose()

    async def call(self, *commands: Command) -> list[Any]:
        """The answers, in order. Raises ServiceError: STORE_UNAVAILABLE, or STORE_REFUSED when the
        store refuses the credentials, which are not tried again."""
        if self._refusal is not None:
            raise self._refusal
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._run(commands)
        # OSError: redis-py lets a dying connection's error through unwrapped.
        except (RedisError, OSError) as error:
            # The URL of a single server may lead to a node of a cluster.
            self.is_cluster |= isinstance(error, ClusterCrossSlotError)
            failure = _as_service_error(error)
            if failure.reason == "STORE_REFUSED":
                logger.error("status store refused us, records are not kept: %s", error)
                self._refusal = failure
            raise failure from error

    async def _run(self, commands: Sequence[Command]) -> list[Any]:
        try:
            return await self._send(commands)
        except NoScriptError:
            for script in self._scripts:
                await self._client.script_load(script.source)
            return await self._send(commands)

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        if len(commands) == 1:
            client = cast("Any", self._client)
            return [await client.execute_command(*commands[0])]
        async with self._client.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return await pipe.execute()


def _as_service_error(error: Exception) -> ServiceError:
    # redis-py wraps errors of new unix connections.
    if isinstance(error, _CREDENTIAL_ERRORS) or isinstance(error.__cause__, _CREDENTIAL_ERRORS):
        text = f"the status store refuses our credentials ({error}); correct the store URL"
        return unavailable("STORE_REFUSED", text)
    what = f"{type(error).__name__}: {error}" if str(error) else "no answer in time"
    text = f"the status store cannot be reached ({what}); try again when it is back"
    return unavailable("STORE_UNAVAILABLE", text, retry_after_s=1.0)
