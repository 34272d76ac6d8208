"""A DNS server for the names of one cluster: A records, and nothing else.

A hosts file would not do. The resolver of gRPC takes all lines of a hosts file that share a name or
an address for one machine, so that the pods behind a headless Service became one.
"""

import asyncio
import struct
from collections.abc import Sequence

_TTL_S = 5  # as CoreDNS
_TYPE_A, _CLASS_IN = 1, 1
_RESPONSE = 0x8580  # authoritative, recursion desired and available
_NO_SUCH_NAME = 3


class DnsServer(asyncio.DatagramProtocol):
    """Answers from `addresses`, which its owner replaces."""

    def __init__(self) -> None:
        self.addresses: dict[str, Sequence[str]] = {}
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(answer(data, self.addresses), address)


def answer(query: bytes, addresses: dict[str, Sequence[str]]) -> bytes:
    """The answer to a query of one question."""
    (query_id,) = struct.unpack_from("!H", query)
    labels, at = [], 12
    while size := query[at]:
        labels.append(query[at + 1 : at + 1 + size].decode("ascii", "replace"))
        at += size + 1
    kind, _ = struct.unpack_from("!HH", query, at + 1)
    question = query[12 : at + 5]
    found = addresses.get(".".join(labels).lower())
    # A name without addresses of this kind is known all the same.
    records = [_record(each) for each in found or ()] if kind == _TYPE_A else []
    flags = _RESPONSE | (_NO_SUCH_NAME if found is None else 0)
    header = struct.pack("!HHHHHH", query_id, flags, 1, len(records), 0, 0)
    return header + question + b"".join(records)


def _record(address: str) -> bytes:
    octets = bytes(int(part) for part in address.split("."))
    # The name is the question's, at offset 12.
    return struct.pack("!HHHIH", 0xC00C, _TYPE_A, _CLASS_IN, _TTL_S, len(octets)) + octets
