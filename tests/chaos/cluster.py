"""The cluster under test: real processes on loopback, joined by proxies that can be cut.

Two routers, two schedulers, three workers, a store. Each process listens on a unix socket that is
new at each start, and everyone reaches the process through proxies, whose ports stay.
"""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc.aio
import numpy as np

from headrace.service.children import tied_to_us
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos import stub_model
from tests.chaos.proxy import Proxy
from tests.chaos.stores import Store, make_store
from tests.headrace.waiting import until

ROUTERS, SCHEDULERS, WORKERS = ("r0", "r1"), ("s0", "s1"), ("w0", "w1", "w2")
# Each worker has one scheduler: a worker takes plans from one at a time.
SCHEDULER_OF = {"w0": "s0", "w1": "s0", "w2": "s1"}
PATIENCE_S = 120.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What to run. An empty model is the stub; wrapper starts routers and schedulers, and is told
    which service to start.
    """

    store: str = "single"
    model: str = ""
    model_name: str = stub_model.MODEL
    step_ms: float = 20.0
    wrapper: Sequence[str] = ()
    scheduler_of: Mapping[str, str] = field(default_factory=lambda: dict(SCHEDULER_OF))
    router_flags: Sequence[str] = ()
    scheduler_flags: Sequence[str] = ()
    worker_flags: Sequence[str] = ()


@dataclass(eq=False)
class Service:
    """One service: its process, which comes and goes, and the proxies in front."""

    name: str
    folder: Path
    command: Sequence[str]
    proxies: list[Proxy] = field(default_factory=list)
    process: asyncio.subprocess.Process | None = None
    old: list[asyncio.subprocess.Process] = field(default_factory=list)
    num_starts: int = 0

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Starts a process and sends new connections there once it listens."""
        self.num_starts += 1
        stem = self.folder / f"{self.name}.{self.num_starts}"
        address = self.folder / f"{stem.name}.address"
        command = [
            *(sys.executable, "-m", *self.command),
            *("--listen", f"unix:{stem}.sock", "--address-file", str(address)),
        ]
        with self.log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *tied_to_us(command), stdout=log, stderr=log, start_new_session=True
            )
        self.process = process
        try:
            await until(lambda: address.exists() or process.returncode is not None, PATIENCE_S)
        except TimeoutError:
            raise RuntimeError(f"{self.name} does not start: {self._said()}") from None
        if not address.exists():
            raise RuntimeError(f"{self.name} ended at its start: {self._said()}")
        for proxy in self.proxies:
            proxy.upstream = address.read_text()

    def _said(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        _signal(self.process, number)

    async def kill(self) -> None:
        """SIGKILL, and waits until the process is gone."""
        if self.process is not None:
            await _kill(self.process)

    async def replace(self) -> asyncio.subprocess.Process:
        """Starts a second process of the same name; returns the first, which is stopped only.

        That is what a cluster manager does about a process on a node that is cut off.
        """
        assert self.process is not None
        old = self.process
        self.old.append(old)
        _signal(old, signal.SIGSTOP)
        await self.start()
        return old

    async def bury(self, process: asyncio.subprocess.Process) -> None:
        """Ends a process that was replaced."""
        await _kill(process)
        self.old.remove(process)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)


async def _kill(process: asyncio.subprocess.Process) -> None:
    _signal(process, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await process.wait()


class Cluster:
    """All services and the proxies between them."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.shape = shape
        self.folder = folder
        self.services: dict[str, Service] = {}
        self.proxies: dict[str, Proxy] = {}
        self.store: Store = make_store(shape.store, folder)
        self.workers = tuple(shape.scheduler_of)
        self.schedulers = tuple(dict.fromkeys(shape.scheduler_of.values()))
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._stack.enter_async_context(self.store)
            await self._build()
            await asyncio.gather(*(service.start() for service in self.services.values()))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for service in self.services.values():
            for old in tuple(service.old):
                await service.bury(old)
            await service.kill()
        await self._stack.aclose()

    def address(self, router: str) -> str:
        """Where clients reach a router."""
        return self.proxies[f"client-{router}"].address

    async def until_ready(self) -> None:
        """Waits until each router has all workers."""
        for router in ROUTERS:
            async with asyncio.timeout(PATIENCE_S):
                async with grpc.aio.insecure_channel(self.address(router)) as channel:
                    stub = inference_pb2_grpc.InferenceStub(channel)
                    while True:
                        request = inference_pb2.ListModelsRequest()
                        models = (await stub.ListModels(request, wait_for_ready=True)).models
                        if models and models[0].num_ready_workers == len(self.workers):
                            break
                        await asyncio.sleep(_POLL_S)

    @property
    def links(self) -> dict[str, list[Proxy]]:
        """Proxies by kind of link, e.g. "router-scheduler"."""
        found: dict[str, list[Proxy]] = {}
        for name, proxy in self.proxies.items():
            near, far = name.split("-")
            found.setdefault(f"{kind_of(near)}-{kind_of(far)}", []).append(proxy)
        return found

    @property
    def num_recomputed_tokens(self) -> int:
        files = (self._counts_file(worker) for worker in self.workers)
        return sum(int(np.fromfile(file, dtype=np.int64)[0]) for file in files if file.exists())

    def num_placed(self, request_id: str) -> int:
        """How often a stub worker was given the request."""
        files = (Path(f"{self._counts_file(worker)}.placed") for worker in self.workers)
        return sum(file.read_text().split().count(request_id) for file in files)

    async def _build(self) -> None:
        model = self.shape.model
        if not model:
            model = str(stub_model.write_model(self.folder / "model"))
        for worker in self.workers:
            self._add(worker, *self._worker_command(worker))
        for scheduler in self.schedulers:
            mine = [w for w in self.workers if self.shape.scheduler_of[w] == scheduler]
            to_workers = [
                flag for w in mine for flag in ("--worker", await self._link(scheduler, w))
            ]
            self._add(
                scheduler,
                *("scheduler", "--scheduler-id", scheduler, *to_workers),
                *("--store-url", await self._store_url(scheduler)),
                *("--step-timeout-s", "4", "--max-num-losses", "1000", "--quarantine-s", "0"),
                *("--drain-timeout-s", "5"),
                *self.shape.scheduler_flags,
            )
        for router in ROUTERS:
            links = [await self._link(router, scheduler) for scheduler in self.schedulers]
            self._add(
                router,
                *("router", "--router-id", router),
                *(flag for link in links for flag in ("--scheduler", link)),
                *("--model", model, "--model-name", self.shape.model_name),
                *("--store-url", await self._store_url(router)),
                *("--max-unread-tokens", "200", "--drain-timeout-s", "5"),
                *self.shape.router_flags,
            )
            await self._link("client", router)

    def _add(self, name: str, *command: str) -> None:
        if name not in WORKERS:
            command = (*self.shape.wrapper, *command)
        self.services[name] = Service(name, self.folder, command)

    def _worker_command(self, worker: str) -> tuple[str, ...]:
        shape = self.shape
        if shape.model:
            return (
                *("gpuworker", "--model", shape.model, "--model-name", shape.model_name),
                *("--worker-id", worker, "--num-threads", "1", "--num-kv-blocks", "200"),
                *shape.worker_flags,
            )
        # One worker plans ahead, as on a GPU.
        depth = "2" if worker == self.workers[0] else "1"
        return (
            *("tests.chaos.stub_worker", "--worker-id", worker, "--step-ms", str(shape.step_ms)),
            *("--pipeline-depth", depth, "--counts-file", str(self._counts_file(worker))),
            *shape.worker_flags,
        )

    async def _store_url(self, service: str) -> str:
        """The store's URL for a service, through a proxy where the store is one server."""
        if not self.store.address:
            return self.store.url
        link = await self._link(service, "store")
        self.proxies[f"{service}-store"].upstream = self.store.address
        return f"redis://{link}/0"

    async def _link(self, near: str, far: str) -> str:
        """The address of a new proxy between two services."""
        proxy = await self._stack.enter_async_context(Proxy(f"{near}-{far}"))
        self.proxies[proxy.name] = proxy
        if far in self.services:
            self.services[far].proxies.append(proxy)
        return proxy.address

    def _counts_file(self, worker: str) -> Path:
        return self.folder / f"{worker}.counts"


def kind_of(name: str) -> str:
    """The kind of a service: "router" of "r0"."""
    kinds = {"r": "router", "s": "scheduler", "w": "worker"}
    return kinds[name[0]] if name[1:].isdecimal() else name
