"""Schedulers that share workers by leases, against a real API server; what they drive is faked."""

import asyncio
from contextlib import asynccontextmanager

import kubernetes
import pytest

from headrace.kubernetes.api import connect
from headrace.kubernetes.ownership import OwnedWorker, Ownership
from headrace.service.discovery import OwnershipConfig
from tests.kubernetes.cluster import WORKERS, Namespace
from tests.kubernetes.control_plane import ControlPlane

QUICK = OwnershipConfig(
    lease_duration_s=4, renew_every_s=0.3, rebalance_after_s=0.5, release_timeout_s=20.0
)


class Driven:
    """What a scheduler drives: a worker that is retired is gone unless it is busy."""

    def __init__(self) -> None:
        self.workers: dict[str, OwnedWorker] = {}
        self.busy: set[str] = set()
        self.retired: list[str] = []

    def add(self, worker: OwnedWorker) -> None:
        self.workers[worker.address] = worker

    def retire(self, address: str) -> None:
        self.retired.append(address)
        if address not in self.busy:
            self.workers.pop(address, None)

    def num_requests(self, address: str) -> int | None:
        if address not in self.workers:
            return None
        return int(address in self.busy)

    def finish(self, address: str) -> None:
        self.busy.discard(address)
        if address in self.retired:
            self.workers.pop(address, None)


class Member:
    """One run of a scheduler."""

    def __init__(self, namespace: Namespace, name: str, config: OwnershipConfig = QUICK) -> None:
        self.driven = Driven()
        self._of = namespace.discovery(), WORKERS, config
        self._name = name
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        api = await connect(self._of[0])
        self.ownership = Ownership(api, *self._of, member=self._name, drives=self.driven)
        await self.ownership.run()

    def owned(self) -> set[str]:
        return set(self.ownership.owned) if hasattr(self, "ownership") else set()

    def term(self, name: str) -> int:
        return self.ownership.owned[name].term

    async def die(self) -> None:
        """Ends without a word to anybody."""
        self.task.cancel()
        await asyncio.wait([self.task])
        assert self.task.cancelled(), self.task.exception()


@asynccontextmanager
async def members(namespace: Namespace, *names: str):
    started = [Member(namespace, name) for name in names]
    try:
        yield started
    finally:
        for member in started:
            if not member.task.done():
                await member.die()


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Namespace:
    made = Namespace(control_plane)
    for i in range(4):
        made.add_pod(f"w-{i}", f"127.0.0.1:{7000 + i}")
    return made


async def until(condition, what: str = "") -> None:
    try:
        async with asyncio.timeout(30):
            while not condition():  # noqa: ASYNC110 the conditions are of many kinds
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(what or "it does not come to that") from None


ALL = {"w-0", "w-1", "w-2", "w-3"}


async def test_workers_are_shared_out_and_taken_over_when_their_owner_leaves(namespace: Namespace):
    async with members(namespace, "s-0", "s-1") as (first, second):
        await until(lambda: len(first.owned()) == 2 and len(second.owned()) == 2)
        assert first.owned() | second.owned() == ALL
        addresses = [set(member.driven.workers) for member in (first, second)]
        assert not addresses[0] & addresses[1]
        terms = {name: first.term(name) for name in first.owned()}
        (busy, _) = sorted(first.driven.workers)
        first.driven.busy.add(busy)
        first.ownership.drain()
        await until(lambda: len(second.owned()) == 3, "an idle worker of a scheduler that drains")
        assert list(first.driven.workers) == [busy]
        first.driven.finish(busy)
        await until(lambda: second.owned() == ALL)
        assert all(second.term(name) > term for name, term in terms.items())
        await first.ownership.release()


async def test_the_end_of_a_scheduler_frees_what_it_still_has_at_once(namespace: Namespace):
    patient = OwnershipConfig(lease_duration_s=600, renew_every_s=0.3)
    async with members(namespace, "s-1") as (second,):
        first = Member(namespace, "s-0", patient)
        await until(lambda: len(first.owned() | second.owned()) == 4)
        first.driven.busy.update(first.driven.workers)
        await first.ownership.release()
        await first.die()
        await until(lambda: second.owned() == ALL)


async def test_a_dead_scheduler_loses_its_workers_when_its_lease_has_ended(namespace: Namespace):
    async with members(namespace, "s-0", "s-1") as (first, second):
        await until(lambda: len(first.owned()) == 2 and len(second.owned()) == 2)
        terms = {name: first.term(name) for name in first.owned()}
        await first.die()
        await until(lambda: second.owned() == ALL)
        assert all(second.term(name) > term for name, term in terms.items())


async def test_a_scheduler_that_starts_again_has_its_workers_at_once(namespace: Namespace):
    patient = OwnershipConfig(lease_duration_s=600, renew_every_s=0.3)
    before = Member(namespace, "s-0", patient)
    await until(lambda: before.owned() == ALL)
    term = before.term("w-0")
    await before.die()
    after = Member(namespace, "s-0", patient)
    await until(lambda: after.owned() == ALL)
    assert after.term("w-0") > term
    await after.die()


async def test_of_two_schedulers_of_one_name_the_older_one_gives_way(namespace: Namespace, caplog):
    async with members(namespace, "s-0") as (older,):
        await until(lambda: older.owned() == ALL)
        newer = Member(namespace, "s-0")
        await until(lambda: newer.owned() == ALL)
        await until(lambda: not older.owned())
        assert not older.driven.workers
        assert "another scheduler calls itself s-0" in caplog.text
        await newer.die()


async def test_a_term_that_a_worker_refuses_is_raised_by_the_owner(namespace: Namespace):
    async with members(namespace, "s-0") as (owner,):
        await until(lambda: owner.owned() == ALL)
        # A person deletes the lease, so its number begins again; the worker remembers.
        with namespace.plane.client() as client:
            kubernetes.client.CoordinationV1Api(client).delete_namespaced_lease(
                "w-0", namespace.name
            )
        known = owner.term("w-0") + 5
        await until(lambda: "127.0.0.1:7000" in owner.driven.retired)
        await until(lambda: owner.owned() == ALL)

        def is_accepted() -> bool:
            worker = owner.ownership.owned["w-0"]
            if worker.term <= known:
                worker.contest()
            return worker.term > known

        await until(is_accepted)


async def test_a_worker_that_leaves_is_left_and_its_successor_is_driven(namespace: Namespace):
    async with members(namespace, "s-0") as (owner,):
        await until(lambda: owner.owned() == ALL)
        term = owner.term("w-0")
        owner.driven.busy.add("127.0.0.1:7000")
        namespace.delete_pod("w-0")
        await until(lambda: owner.driven.retired == ["127.0.0.1:7000"])
        assert "w-0" in owner.owned(), "it has requests"
        owner.driven.finish("127.0.0.1:7000")
        await until(lambda: "w-0" not in owner.owned())
        namespace.delete_pod("w-0", grace_s=0)
        namespace.add_pod("w-0", "127.0.0.1:7010")
        await until(lambda: "127.0.0.1:7010" in owner.driven.workers)
        assert owner.term("w-0") > term
