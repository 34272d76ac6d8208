"""Connections that say nothing, or are too many; over real sockets."""

import asyncio
import contextlib
import socket

import grpc
import pytest

from headrace.service import serving
from headrace.service.channels import open_channel
from headrace.service.serving import GrpcServer, ServingConfig
from tests.headrace.raw_http2 import (
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    RawHttp2,
)

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
REFUSED_STREAM = 7


@pytest.fixture
async def start():
    """Starts a server with settings, and the module's limits changed."""
    servers = []

    async def start(monkeypatch, settings=None, **limits):
        for name, value in limits.items():
            monkeypatch.setattr(serving, name, value)
        servers.append(GrpcServer(ServingConfig(**settings or {}), []))
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
    address = await start(monkeypatch, {"max_connections": 2})
    first, second = RawHttp2(address), RawHttp2(address)
    for held in (first, second):
        held.until(SETTINGS, 0)
    with connect(address) as third:
        await asyncio.to_thread(read_to_the_end, third)
    first.close()
    assert await is_answered(address)
    second.close()


async def test_calls_beyond_the_limit_of_a_connection_are_refused(start, monkeypatch):
    address = await start(monkeypatch, {"max_streams_per_connection": 2})
    with RawHttp2(address) as greedy:
        greedy.until(SETTINGS, 0)
        streams = [greedy.headers(WATCH) for _ in range(3)]
        refused = await asyncio.to_thread(greedy.until, RST_STREAM, streams[-1])
        assert int.from_bytes(refused, "big") == REFUSED_STREAM
        assert await is_answered(address)


async def test_a_flood_of_pings_ends_the_connection(start, monkeypatch):
    address = await start(monkeypatch)
    with RawHttp2(address) as flood:
        flood.until(SETTINGS, 0)
        with contextlib.suppress(ConnectionError):
            for _ in range(200):
                flood.send(PING, 0, 0, bytes(8))
        told = await asyncio.to_thread(flood.until, GOAWAY, 0)
        assert told[8:] == b"too_many_pings"
        assert await is_answered(address)


async def test_a_ping_now_and_then_is_welcome_without_calls(start, monkeypatch):
    address = await start(monkeypatch)
    with RawHttp2(address) as gateway:
        for _ in range(50):
            gateway.send(PING, 0, 0, bytes(8))
            await asyncio.to_thread(gateway.until, PING, 0)


@pytest.mark.parametrize(("num_bytes", "is_taken"), [(1200, True), (2100, False), (500_000, False)])
async def test_too_much_metadata_is_refused(start, monkeypatch, num_bytes, is_taken):
    address = await start(monkeypatch, {"max_metadata_bytes": 2048})
    async with open_channel(address) as channel:
        call = channel.unary_unary(CHECK)(b"", timeout=60, metadata=(("x-much", "m" * num_bytes),))
        if is_taken:
            await call
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        codes = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE}
        assert caught.value.code() in codes
        assert await is_answered(address)
