"""Scenes for the tests of windows: requests of several kinds, read while something is held."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from random import Random
from typing import Any

import grpc
import grpc.aio
import redis.asyncio

from headrace.client import ResumePolicy
from headrace.status.scripts import claim_script
from headrace.status.states import State
from headrace.v1 import inference_pb2, inference_pb2_grpc
from tests.chaos import library
from tests.chaos.checker import final_faults
from tests.chaos.cluster import PATIENCE_S, ROUTERS, Cluster, Shape
from tests.chaos.proxy import Trap
from tests.chaos.reader import FailedError, Reader
from tests.chaos.received import ABORTED, Received
from tests.chaos.tally import Tally
from tests.chaos.wanted import Wanted, answer
from tests.headrace.waiting import eventually, until

# One scheduler and one worker: the way of each request is known.
SHAPE = Shape(
    step_ms=5,
    scheduler_of={"w0": "s0"},
    router_flags=("--max-unread-tokens", "20", "--waiting-allowance", "0"),
    worker_flags=("--num-kv-blocks", "60", "--max-num-seqs", "4"),
)
# What a router calls to claim a request.
CLAIM = sha1(
    claim_script(live_ttl_ms=24 * 3_600_000, ended_ttl_ms=3_600_000).encode(),
    usedforsecurity=False,
).hexdigest()
_POLICY = ResumePolicy(timeout_s=PATIENCE_S, first_backoff_s=0.05, max_backoff_s=0.5)
_POLL_S = 0.005
_CHANNEL = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request."""

    num_tokens: int = 40
    n: int = 1
    is_drawn: bool = False
    has_stop: bool = False
    logprobs: int | None = None

    def wanted(self, request_id: str) -> Wanted:
        request = inference_pb2.GenerateRequest(request_id=request_id, keep_on_disconnect=True)
        request.text = prompt = f"{request_id}: "
        sampling = request.sampling
        sampling.max_tokens, sampling.n, sampling.ignore_eos = self.num_tokens, self.n, True
        sampling.temperature, sampling.seed = float(self.is_drawn), 7
        if self.logprobs is not None:
            sampling.logprobs = self.logprobs
        if self.has_stop:
            text = answer(request, prompt.encode(), 0).text
            sampling.stop.append(text[len(text) // 2 :][:3])
        answers = [answer(request, prompt.encode(), index) for index in range(self.n)]
        return Wanted(request, "read", answers)


KINDS: Mapping[str, Kind] = {
    "one-token": Kind(num_tokens=1),
    "long": Kind(num_tokens=60),
    "two": Kind(n=2, is_drawn=True),
    "stopped": Kind(has_stop=True),
    "logprobs": Kind(num_tokens=20, logprobs=2),
}
# Two of these do not fit into the KV blocks.
HEAVY = Kind(num_tokens=430)


@dataclass(slots=True)
class Reading:
    """Requests that are being read."""

    received: list[Received]
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    async def until_begun(self, num_tokens: int = 1) -> None:
        """Waits until so many tokens of each have come."""
        for one in self.received:
            await until(lambda one=one: min(one.positions) >= num_tokens, PATIENCE_S)  # type: ignore[misc]

    async def finish(self) -> None:
        """Waits for the end of each; what comes must be exact."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self.tasks)
        faults = {one.wanted.request.request_id: one.faults for one in self.received if one.faults}
        assert not faults, faults
        assert all(one.is_finished for one in self.received)


class Scene:
    """The cluster of one module; each test has its own requests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.name = ""
        self._channels = {
            router: grpc.aio.insecure_channel(cluster.address(router), _CHANNEL)
            for router in ROUTERS
        }
        self._stubs = {
            router: inference_pb2_grpc.InferenceStub(channel)
            for router, channel in self._channels.items()
        }
        self._ended: dict[str, Received] = {}
        self._traps: list[Trap] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._store = redis.asyncio.Redis(
            port=cluster.store.nodes[0].port, decode_responses=True, socket_timeout=5
        )

    @contextlib.asynccontextmanager
    async def act(self, name: str) -> AsyncIterator[None]:
        """One test, whose requests have names that begin with this one."""
        self.name, self._ended = name, {}
        try:
            yield
            self.release()
            await self.restart(*self.cluster.services)
            await self.settle()
        except BaseException:
            await self._end()
            await self._start_afresh()
            raise
        await self._end()

    async def _end(self) -> None:
        """Nothing of the test is held or runs any more."""
        self.name = ""
        self.release()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=PATIENCE_S)
        self._traps.clear()
        self._tasks.clear()

    async def _start_afresh(self) -> None:
        """What a failed test has left must not fail the next one."""
        await self.kill(*self.cluster.services)
        await self._store.flushall()
        await self.restart(*self.cluster.services)
        await self.cluster.until_ready()

    async def settle(self) -> None:
        """Waits until nothing lives; all records are as clients have read."""
        faults = await final_faults(
            self.cluster,
            self._ended,
            is_store_exact=True,
            patience_s=PATIENCE_S,
            of=f"{self.name}.",
        )
        assert not faults, faults

    def trap(self, link: str, marker: str | None = None, *, holds_answers: bool = False) -> Trap:
        """A trap on a link, for the requests of this test if no marker is given."""
        proxy = self.cluster.proxies[link]
        marker = f"{self.name}." if marker is None else marker
        self._traps.append(trap := proxy.trap(marker, holds_answers=holds_answers))
        return trap

    async def until_sprung(self, trap: Trap) -> None:
        """Waits until a trap holds something."""
        try:
            await until(trap.sprung.is_set, PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{trap} holds nothing") from None

    def release(self) -> None:
        """Releases all traps."""
        for trap in self._traps:
            trap.release()

    def read(
        self,
        *kinds: str,
        routers: Sequence[str] = ROUTERS,
        recover_always: bool = False,
    ) -> Reading:
        """Begins to read a request of each kind."""
        ids = {f"{self.name}.{kind}": KINDS[kind] for kind in kinds or KINDS}
        reading = Reading([Received(kind.wanted(name)) for name, kind in ids.items()])
        addresses = [self.cluster.address(router) for router in routers]
        for one in reading.received:
            self._ended[one.wanted.request.request_id] = one
            task = library.read(
                one, addresses, Tally(), policy=_POLICY, recover_always=recover_always
            )
            reading.tasks.append(asyncio.create_task(task))
        self._tasks += reading.tasks
        return reading

    async def kill(self, *names: str) -> None:
        await asyncio.gather(*(self.cluster.services[name].kill() for name in names))

    async def restart(self, *names: str) -> None:
        """Starts those that do not run."""
        services = (self.cluster.services[name] for name in names)
        await asyncio.gather(*(s.start() for s in services if not s.is_running))

    def raw(
        self,
        kind: Kind,
        name: str,
        router: str,
        *,
        recover_always: bool = False,
        resumes: bool = False,
    ) -> Reader:
        """A request by the protocol alone; not sent yet, or sent before."""
        received = Received(kind.wanted(f"{self.name}.{name}"))
        if recover_always:
            received.wanted.request.recover = inference_pb2.GenerateRequest.RECOVER_ALWAYS
        self._ended[received.wanted.request.request_id] = received
        return Reader(received, self._stubs, Random(1), Tally(), router=router, resumes=resumes)

    def start(self, reading: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that ends with the test."""
        self._tasks.append(task := asyncio.create_task(reading))
        return task

    async def leave(self, reader: Reader, *states: State) -> None:
        """Sends a request, and closes the call when the store says that it is in such a state."""
        reading = self.start(reader.read())
        name = reader.received.wanted.request.request_id.removeprefix(f"{self.name}.")
        await self.until_state(name, *states)
        reading.cancel()
        await asyncio.wait([reading])

    async def abort(self, name: str, router: str) -> int:
        """The outcome of an Abort at a router."""
        request = inference_pb2.AbortRequest(request_ids=[f"{self.name}.{name}"])
        stub: Any = self._stubs[router]
        response = await stub.Abort(request, timeout=PATIENCE_S, wait_for_ready=True)
        return int(response.outcomes[0].result)

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await self._store.aclose()

    def num_placed(self, name: str) -> int:
        """How often the worker was given a request, its completions together."""
        request_id = f"{self.name}.{name}"
        return sum(self.cluster.num_placed(f"{request_id}{of}") for of in ("", "#0", "#1"))

    async def record(self, kind: str) -> Mapping[str, str]:
        """What the store says of a request's first completion."""
        key = f"headrace:2:{{{self.name}.{kind}}}:status#0"
        return await self._store.hgetall(key)  # type: ignore[misc, no-any-return]

    async def until_state(self, kind: str, *states: State) -> Mapping[str, str]:
        """Waits until the store says so."""
        act, record = self.name, {}

        async def is_there() -> bool:
            nonlocal record
            record = await self.record(kind)
            return record.get("state") in states or self.name != act

        try:
            await eventually(is_there, PATIENCE_S)
        except TimeoutError:
            raise AssertionError(f"{act}.{kind} stays {record.get('state')}") from None
        return record

    def watch(self, kind: str) -> list[str]:
        """The states that a record has from now on, as far as they are seen."""
        seen: list[str] = []
        act = self.name

        async def look() -> None:
            while self.name == act:
                state = (await self.record(kind)).get("state", "")
                if seen[-1:] != [state]:
                    seen.append(state)
                await asyncio.sleep(_POLL_S)

        self.start(look())
        return seen


async def read_to_end(reader: Reader) -> None:
    """Reads a request to its end, which somebody may have asked for; what comes must be exact."""
    received = reader.received
    async with asyncio.timeout(PATIENCE_S):
        try:
            await reader.read()
        except FailedError as failure:
            is_aborted = failure.error.code is grpc.StatusCode.ABORTED
            if not (received.was_aborted and is_aborted):
                raise
            received.end(ABORTED)
    assert not received.faults, received.faults
