"""Where peers come from: lists and DNS. Kubernetes has tests of its own, in tests/kubernetes."""

import asyncio
import socket

import pytest

from headrace.service.config import ConfigError
from headrace.service.discovery import DiscoveryConfig, open_source
from headrace.service.peers import DnsPeers, Peer, StaticPeers


async def test_a_list_is_yielded_once():
    sets = [peers async for peers in StaticPeers(["a:1", "b:1"]).changes()]
    assert sets == [frozenset({Peer("a:1", "a:1"), Peer("b:1", "b:1")})]


class Names:
    """A name server; a name without addresses cannot be looked up."""

    def __init__(self, monkeypatch):
        self.addresses = {}
        self.num_asked = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self.look_up, raising=False)

    async def look_up(self, host, port, **_):
        self.num_asked += 1
        if not self.addresses.get(host):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(0, 0, 0, "", (address, port)) for address in self.addresses[host]]


async def test_a_name_stands_for_all_its_addresses_as_they_are_now(monkeypatch):
    names = Names(monkeypatch)
    sets = aiter(DnsPeers(["workers:8702"], 0.001).changes())
    async with asyncio.timeout(20):
        assert await anext(sets) == frozenset()
        names.addresses["workers"] = ["10.0.0.1", "fd00::1"]
        assert {peer.address for peer in await anext(sets)} == {"10.0.0.1:8702", "[fd00::1]:8702"}
        names.addresses["workers"] = ["10.0.0.2"]
        assert {peer.address for peer in await anext(sets)} == {"10.0.0.2:8702"}


async def test_a_name_server_that_fails_ends_no_peer(monkeypatch):
    names = Names(monkeypatch)
    names.addresses = {"a": ["10.0.0.1"], "b": ["10.0.0.2"]}
    sets = aiter(DnsPeers(["a:1", "b:1"], 0.001).changes())
    async with asyncio.timeout(20):
        assert len(await anext(sets)) == 2
        names.addresses = {"b": ["10.0.0.2", "10.0.0.3"]}
        assert {p.address for p in await anext(sets)} == {"10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"}


@pytest.mark.parametrize(
    ("type_", "addresses", "selector", "message"),
    [
        ("static", [], "", "at least one --worker"),
        ("static", ["a:1"], "x=y", "--worker-selector is for"),
        ("dns", ["a"], "", "'a' is no HOST:PORT"),
        ("kubernetes", [], "", "takes --worker-selector"),
        ("kubernetes", ["a:1"], "x=y", "and no --worker"),
    ],
)
def test_what_a_source_lacks_is_said(type_, addresses, selector, message):
    with pytest.raises(ConfigError, match=message):
        open_source(DiscoveryConfig(type=type_), addresses, selector, flag="worker")
