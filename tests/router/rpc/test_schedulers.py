"""A router whose schedulers come and go."""

import asyncio
import functools

from headrace.service.channels import ChannelConfig, open_channel
from router.rpc.scheduler_client import SchedulerClient
from router.rpc.schedulers import Schedulers
from tests.headrace.changing_peers import ChangingPeers
from tests.router.fake_scheduler import MODEL, FakeScheduler
from tests.router.stack import running_stack


class Following:
    """Links that follow a set of schedulers, for the router of a stack."""

    def __init__(self, stack, addresses) -> None:
        self.peers = ChangingPeers(addresses)
        self._stack = stack
        make = functools.partial(SchedulerClient, router=stack.router, router_id="router-0")
        self.links = Schedulers(self.peers, lambda at: open_channel(at, ChannelConfig()), make)

    async def __aenter__(self):
        self._task = asyncio.create_task(self.links.run())
        return self

    async def __aexit__(self, *_):
        self._task.cancel()
        await asyncio.wait([self._task])

    def names(self):
        return sorted(link.name for link in self.links)

    def workers(self):
        pool = self._stack.router.pool
        return len(pool.ready(MODEL, self._stack.router.now()))


async def test_a_scheduler_that_comes_is_connected_and_one_that_ends_is_forgotten():
    async with (
        FakeScheduler() as first,
        FakeScheduler() as second,
        running_stack() as stack,
        Following(stack, [first.address]) as it,
    ):
        # The stack has a scheduler of its own.
        await stack.until(lambda: it.workers() == 2)
        it.peers.set([first.address, second.address])
        await stack.until(lambda: it.workers() == 3)
        it.peers.set([second.address], leaving=[first.address])
        await stack.until(lambda: it.workers() == 2)
        assert len(it.names()) == 2, "what runs there goes on"
        it.peers.set([second.address])
        await first.stop()
        await stack.until(lambda: it.names() == [second.address])


async def test_a_scheduler_that_was_never_reached_is_given_up():
    async with running_stack() as stack, Following(stack, ["127.0.0.1:1"]) as it:
        await stack.until(it.names)
        it.peers.set([])
        await stack.until(lambda: not it.names())
