"""Calls to the Kubernetes API server: JSON in, JSON out, and every call ends in time.

The `kubernetes` package gives configuration, TLS and tokens. Its informer and its typed calls are
not used: a watch that goes silent would never end, and objects of newer servers would be refused.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Self

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.config import incluster_config, kube_config
from kubernetes.aio.config.config_exception import ConfigException

from headrace.service.config import ConfigError
from headrace.service.discovery import DiscoveryConfig

_CALL_TIMEOUT_S = 5.0
_SERVICE_ACCOUNT = Path(incluster_config.SERVICE_TOKEN_FILENAME).parent

Json = dict[str, Any]


class ApiError(Exception):
    """A call failed; status is the HTTP status, 0 when the server did not answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """A connection to the API server, and the namespace that we work in."""

    def __init__(self, configuration: client.Configuration, namespace: str) -> None:
        self._client = client.ApiClient(configuration)
        self.namespace = namespace

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """The answer to one call.

        Raises:
            ApiError: the server refuses the call, or does not answer it in time.
        """
        async with self._request(
            method, path, query, body, content_type, _CALL_TIMEOUT_S
        ) as response:
            found: Json = json.loads(await response.read())
            return found

    async def watch(
        self, path: str, query: Mapping[str, str], timeout_s: float
    ) -> AsyncGenerator[Json, None]:
        """Events, until the server ends the watch; never for longer than timeout_s.

        Raises:
            ApiError: the server refuses the watch, breaks it, or is silent at its end.
        """
        # The server ends the watch in time; a server that cannot be reached does not.
        query = {**query, "watch": "true", "timeoutSeconds": str(max(1, int(timeout_s)))}
        async with self._request("GET", path, query, None, "", timeout_s + 1) as response:
            async for line in response.content:
                yield json.loads(line)

    @contextlib.asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Json | None,
        content_type: str,
        timeout_s: float,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Accept": "application/json"}
        if content_type:
            headers["Content-Type"] = content_type
        response = None
        try:
            request = await self._client.param_serialize(
                *(method, path),
                query_params=list((query or {}).items()),
                header_params=headers,
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.call_api(*request, _request_timeout=timeout_s)
            response = answer.response
            if response.status >= 300:
                raise ApiError(response.status, _message(await response.read()))
            yield response
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiError(0, str(error) or type(error).__name__) from error
        finally:
            if response is not None:
                response.close()


async def connect(config: DiscoveryConfig) -> Api:
    """The API server that the settings, the pod or the user's kubeconfig name.

    Raises:
        ConfigError: none is named, or what names it cannot be read.
    """
    configuration = client.Configuration()
    namespace = config.namespace
    try:
        if config.kubeconfig or "KUBERNETES_SERVICE_HOST" not in os.environ:
            file = config.kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
            loader = await kube_config.load_kube_config(
                file, client_configuration=configuration, persist_config=False
            )
            namespace = namespace or loader.current_context["context"].get("namespace", "default")
        else:
            incluster_config.load_incluster_config(configuration)
            namespace = namespace or (_SERVICE_ACCOUNT / "namespace").read_text().strip()
    except (ConfigException, OSError) as error:
        raise ConfigError(
            f"cannot reach the Kubernetes API: {error}; give --discovery-kubeconfig, or let the pod"
            " have the token of a service account"
        ) from error
    return Api(configuration, namespace)


def check(config: DiscoveryConfig) -> None:
    """Raises ConfigError if `connect` would; no event loop may run."""

    async def connect_once() -> None:
        async with await connect(config):
            pass

    asyncio.run(connect_once())


def _message(body: bytes) -> str:
    """What the API server says of a refusal."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:200]
