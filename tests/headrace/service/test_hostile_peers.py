"""Connections that say nothing, or are too many; over real sockets."""

import asyncio
import socket

import pytest

from headrace.service import serving
from headrace.service.channels import open_channel
from headrace.service.serving import GrpcServer, ServingConfig
from tests.headrace.raw_http2 import DATA, HEADERS, SETTINGS, RawHttp2

CHECK = "/grpc.health.v1.Health/Check"


@pytest.fixture
async def start():
    """Starts a server with the module's limits changed."""
    servers = []

    async def start(monkeypatch, **limits):
        for name, value in limits.items():
            monkeypatch.setattr(serving, name, value)
        servers.append(GrpcServer(ServingConfig(), []))
        return await servers[-1].start()

    yield start
    for server in servers:
        await server.stop(0)


async def is_answered(address):
    async with open_channel(address) as channel:
        return await channel.unary_unary(CHECK)(b"", timeout=60, wait_for_ready=True) is not None


def connect(address):
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(60)
    return connection


def read_to_the_end(connection):
    while connection.recv(65_536):
        pass


@pytest.mark.parametrize("sent", [b"", b"PRI * HTTP/2.0\r\n\r\n", b"\x16\x03\x01"])
async def test_a_connection_that_never_gets_started_is_closed(start, monkeypatch, sent):
    address = await start(monkeypatch, _HANDSHAKE_MS=300)
    with connect(address) as silent:
        silent.sendall(sent)
        await asyncio.to_thread(read_to_the_end, silent)
        assert await is_answered(address)


async def test_a_connection_in_the_middle_of_its_headers_is_closed(start, monkeypatch):
    address = await start(monkeypatch, _PING_MS=1_000, _PONG_MS=300)
    with RawHttp2(address, answers_pings=False) as slow:
        # HEADERS that no CONTINUATION follows: nothing else may be sent, not even an answer.
        slow.until(SETTINGS, 0)
        slow.send(HEADERS, 0, 1, b"\x00")
        with pytest.raises((EOFError, ConnectionError)):
            await asyncio.to_thread(slow.until, DATA, 1)
        assert await is_answered(address)


async def test_a_connection_without_calls_is_closed_after_a_while(start, monkeypatch):
    address = await start(monkeypatch, _MAX_IDLE_MS=300)
    with RawHttp2(address) as idle, pytest.raises((EOFError, ConnectionError)):
        await asyncio.to_thread(idle.until, HEADERS, 1)


async def test_connections_beyond_the_limit_are_closed_until_there_is_room(start, monkeypatch):
    address = await start(monkeypatch, _MAX_CONNECTIONS=2)
    first, second = RawHttp2(address), RawHttp2(address)
    for held in (first, second):
        held.until(SETTINGS, 0)
    with connect(address) as third:
        await asyncio.to_thread(read_to_the_end, third)
    first.close()
    assert await is_answered(address)
    second.close()
