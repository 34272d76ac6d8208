"""Headrace on one machine: router, scheduler and gpuworkers as child processes.

Starts them in the order in which they find each other, waits until a model answers, and stops
them in reverse. From then on a service that dies is started again. When this process ends in
whatever way, so do they.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.client import ChannelConfig, HeadraceClient, ServiceError
from headrace.service import progress
from headrace.service.channels import open_channel
from headrace.service.private_dir import private_dir
from headrace.status.embedded import EmbeddedStore, EmbeddedStoreError
from headrace.supervisor import (
    Child,
    LocalError,
    Program,
    Restarts,
    Tell,
    content_of,
    keep_running,
)

__all__ = ["LocalConfig", "LocalError", "LocalPool", "Restarts", "local_pool"]

T = TypeVar("T")

_POLL_S = 0.1
_CHECK_TIMEOUT_S = 1.0
# Beyond a service's drain: to close its streams, flush its store and export its traces.
_STOP_SLACK_S = 8.0


def _programs() -> dict[str, tuple[str, ...]]:
    # -P: a file router.py in the current folder must not be imported instead of the package.
    return {
        name: (sys.executable, "-P", "-m", name) for name in ("gpuworker", "scheduler", "router")
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """What to run.

    store_url None starts an embedded store, which keeps its records in data_dir if that is given;
    "" is no store. admin_listen is where the router's admin port listens; "" is none. shared_flags
    go to all services. channel is for asking the router whether it is ready; with None the router
    is not asked, because it wants a client certificate.
    """

    model_path: Path
    model_name: str
    listen: str = "127.0.0.1:0"
    admin_listen: str = ""
    num_workers: int = 1
    store_url: str | None = None
    data_dir: Path | None = None
    drain_timeout_s: float = 5.0
    restarts: Restarts = field(default_factory=Restarts)
    channel: ChannelConfig | None = field(default_factory=ChannelConfig)
    shared_flags: Sequence[str] = ()
    worker_flags: Sequence[str] = ()
    scheduler_flags: Sequence[str] = ()
    router_flags: Sequence[str] = ()
    programs: Mapping[str, Sequence[str]] = field(default_factory=_programs)


class LocalPool:
    """The running services. `children` are in order of start."""

    def __init__(
        self,
        address: str,
        admin_url: str,
        children: Sequence[Child],
        keeping: Sequence[asyncio.Task[LocalError]],
    ) -> None:
        """address and admin_url ("" is none) are the router's."""
        self.address = address
        self.admin_url = admin_url
        self.children = children
        self._keeping = keeping

    async def wait_failed(self) -> LocalError:
        """Returns when a service is not started again, because it keeps dying, with the reason."""
        done, _ = await asyncio.wait(self._keeping, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()


@contextlib.asynccontextmanager
async def local_pool(
    config: LocalConfig, *, tell: Tell = lambda _: None, log: Tell = lambda _: None
) -> AsyncIterator[LocalPool]:
    """Starts everything, yields when a model answers, stops everything.

    From when it yields to when it stops, a service that dies is started again.

    Args:
        config: what to run.
        tell: called with what is being waited for.
        log: called with each log line of each service, and when one dies and is back.

    Raises:
        LocalError: a service does not start.
    """
    async with contextlib.AsyncExitStack() as stack:
        start = _Start(config, stack.enter_context(private_dir()), stack, tell, log)
        address = await start.everything()
        yield LocalPool(address, start.admin_url, start.children, start.keep_running())


class _Start:
    """Starts services one by one and hands their end to the exit stack."""

    def __init__(
        self,
        config: LocalConfig,
        folder: Path,
        stack: contextlib.AsyncExitStack,
        tell: Tell,
        log: Tell,
    ) -> None:
        self._config = config
        self._folder = folder
        self._stack = stack
        self._tell = tell
        self._log = log
        self.children: list[Child] = []
        self.admin_url = ""
        self._is_started = False

    async def everything(self) -> str:
        """The router's address, once a model answers."""
        config = self._config
        store_environment = await self._store()
        many = f" on {config.num_workers} workers" if config.num_workers > 1 else ""
        self._tell(f"loading {config.model_name}{many}")
        # The workers first, all at once: they take longest.
        model = ("--model", str(config.model_path), "--model-name", config.model_name)
        workers = [
            await self._service(
                "gpuworker",
                f"gpuworker-{i}" if config.num_workers > 1 else "gpuworker",
                [*model, "--worker-id", f"worker-{i}", *config.worker_flags],
            )
            for i in range(config.num_workers)
        ]
        addresses = [await self._address(child) for child in workers]
        to_workers = [flag for address in addresses for flag in ("--worker", address)]
        scheduler = await self._service(
            "scheduler",
            "scheduler",
            ["--scheduler-id", "scheduler-0", *to_workers, *config.scheduler_flags],
            store_environment,
        )
        to_scheduler = ("--scheduler", await self._address(scheduler))
        router = await self._service(
            "router",
            "router",
            ["--router-id", "router-0", *to_scheduler, *model, *config.router_flags],
            store_environment,
            listen=config.listen,
            admin_listen=config.admin_listen,
        )
        address = await self._address(router)
        await self._unless_one_ends(self._until_ready(address))
        if config.admin_listen:
            self.admin_url = await self._unless_one_ends(content_of(self._admin_file("router")))
        return address

    def keep_running(self) -> Sequence[asyncio.Task[LocalError]]:
        """One task for each child that starts the child again when it dies."""
        self._is_started = True
        keeping = [
            asyncio.create_task(
                keep_running(child, self._config.restarts, self._log, self._until_serving)
            )
            for child in self.children
        ]

        async def end() -> None:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

        self._stack.push_async_callback(end)
        return keeping

    async def _store(self) -> dict[str, str]:
        """Starts a store if one is wanted; the environment that tells services its URL.

        Not flags: a URL can hold a password, and every user of the machine can read flags.
        """
        url = self._config.store_url
        if url is None:
            self._tell("starting the status store")
            try:
                embedded = EmbeddedStore(self._config.data_dir)
                url = (await self._stack.enter_async_context(embedded)).url
            except EmbeddedStoreError as error:
                raise LocalError(str(error)) from error
        return {"HEADRACE_SCHEDULER_STORE_URL": url, "HEADRACE_ROUTER_STORE_URL": url}

    async def _service(
        self,
        program: str,
        name: str,
        flags: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        listen: str = "",
        admin_listen: str = "",
    ) -> Child:
        """Starts one service, to be stopped before the services that were started earlier.

        Without `listen` the service listens on a socket in the private folder, which only
        processes of this user can reach. The settings of an admin port are the router's alone.
        """
        config = self._config
        command = [
            *config.programs[program],
            *("--drain-timeout-s", str(config.drain_timeout_s)),
            *("--admin-listen", admin_listen, "--admin-address-file", str(self._admin_file(name))),
            *config.shared_flags,
            *flags,
        ]
        # The packages of the services lie beside this one, installed or not.
        beside = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), beside]))
        ours = {"PYTHONPATH": path, progress.VARIABLE: "1"}
        child = Child(
            Program(
                name=name,
                command=command,
                environment=os.environ | ours | dict(environment or {}),
                listen=listen or f"unix:{self._folder / name}.sock",
                address_file=self._folder / name,
            ),
            self._progress,
            self._log,
        )
        self._stack.push_async_callback(child.stop, config.drain_timeout_s + _STOP_SLACK_S)
        await child.start()
        self.children.append(child)
        return child

    def _admin_file(self, name: str) -> Path:
        return self._folder / f"{name}.admin"

    def _progress(self, what: str) -> None:
        """Progress of the first start; of a restart, the end and the return are said."""
        if not self._is_started:
            self._tell(what)

    async def _address(self, child: Child) -> str:
        """The address of a service, once it listens."""
        return await self._unless_one_ends(child.address())

    async def _until_serving(self, child: Child) -> None:
        """Waits until a service that was started again does its work."""
        address, config = await child.address(), self._config.channel
        if config is None and not address.startswith("unix:"):
            return
        request = health_pb2.HealthCheckRequest()
        async with open_channel(address, config) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    answer = await health.Check(request, timeout=_CHECK_TIMEOUT_S)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(_POLL_S)

    async def _until_ready(self, address: str) -> None:
        """Waits until all workers answer for the model."""
        config = self._config
        if config.channel is None:
            return
        async with HeadraceClient(address, config.channel) as client:
            while True:
                with contextlib.suppress(ServiceError):
                    ready = {m.name: m.num_ready_workers for m in await client.models()}
                    if ready.get(config.model_name, 0) >= config.num_workers:
                        return
                await asyncio.sleep(_POLL_S)

    async def _unless_one_ends(self, step: Awaitable[T]) -> T:
        """The step's result; LocalError when a service ends before."""
        work = asyncio.ensure_future(step)
        end = asyncio.create_task(_first_end(self.children))
        try:
            await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise end.result()
        finally:
            work.cancel()
            end.cancel()
            await asyncio.gather(work, end, return_exceptions=True)


async def _first_end(children: Sequence[Child]) -> LocalError:
    """The first end among the children."""
    ends = [asyncio.create_task(child.ended()) for child in children]
    try:
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for end in ends:
            end.cancel()
