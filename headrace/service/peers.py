"""Who a service's peers are: from a list, from DNS, or from whatever yields such sets.

A source yields the whole set again whenever the set has changed. What a service does about a peer
that came, leaves or has gone is the service's own business.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.service.config import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Peer:
    """A service to connect to.

    is_leaving: the peer ends soon, and gets nothing new.
    """

    name: str
    address: str
    is_leaving: bool = False


class PeerSource(Protocol):
    """Where peers come from."""

    def changes(self) -> AsyncIterator[frozenset[Peer]]:
        """The set of peers, as soon as it is known and after each change.

        The iterator ends when the set cannot change any more.
        """
        ...


class StaticPeers:
    """The peers of a list, which never changes."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._peers = frozenset(Peer(address, address) for address in addresses)

    async def changes(self) -> AsyncIterator[frozenset[Peer]]:
        """The peers, once."""
        yield self._peers


class DnsPeers:
    """All addresses behind some names, looked up again and again.

    A name that cannot be looked up keeps the addresses that it had: a name server that fails must
    not end the work of a healthy peer.
    """

    def __init__(self, names: Sequence[str], interval_s: float) -> None:
        """names: each is host:port.

        Raises:
            ConfigError: a name has no port.
        """
        self._names = [_split(name) for name in names]
        self._interval_s = interval_s
        self._addresses: dict[str, frozenset[str]] = {}

    async def changes(self) -> AsyncIterator[frozenset[Peer]]:
        """The peers, whenever a name has other addresses than before."""
        last: frozenset[Peer] | None = None
        while True:
            for host, port in self._names:
                await self._look_up(host, port)
            found = frozenset().union(*self._addresses.values())
            peers = frozenset(Peer(address, address) for address in found)
            if peers != last:
                last = peers
                yield peers
            await asyncio.sleep(self._interval_s)

    async def _look_up(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        key = f"{host}:{port}"
        try:
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if key not in self._addresses:
                logger.info("cannot look up %s yet: %s", host, error)
                self._addresses[key] = frozenset()
            return
        addresses = (str(info[4][0]) for info in infos)
        self._addresses[key] = frozenset(
            f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            for address in addresses
        )


def _split(name: str) -> tuple[str, int]:
    host, _, port = name.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(f"{name!r} is no HOST:PORT, which discovery by DNS needs")
    return host.strip("[]"), int(port)
