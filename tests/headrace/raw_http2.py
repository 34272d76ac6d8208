"""A gRPC caller made of single HTTP/2 frames, which can do what no well-behaved client does."""

import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 0, 1, 3, 4, 6, 7
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4


class RawHttp2:
    """One connection. Close it, or use it as a context manager."""

    def __init__(self, address: str, *, window: int = 65_535, answers_pings: bool = True) -> None:
        """window is what the server may send on each stream unasked."""
        self._answers_pings = answers_pings
        if address.startswith("unix:"):
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            self._socket = socket.create_connection((host, int(port)))
        self._socket.settimeout(60)
        self._socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window))
        self._next_stream = 1

    def __enter__(self) -> "RawHttp2":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """One frame."""
        head = struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream)
        self._socket.sendall(head + payload)

    def headers(self, method: str, metadata: tuple[tuple[str, str], ...] = ()) -> int:
        """Begins a call; returns its stream."""
        fields = (
            (":method", "POST"), (":scheme", "http"), (":path", method), (":authority", "x"),
            ("te", "trailers"), ("content-type", "application/grpc"), *metadata,
        )  # fmt: skip
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        # Literal fields that are not indexed, names and values as they are.
        block = b"".join(
            b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
            for name, value in fields
        )
        self.send(HEADERS, END_HEADERS, stream, block)
        return stream

    def message(self, stream: int, message: bytes = b"", *, num_bytes: int | None = None) -> None:
        """A request, or its beginning when num_bytes says that more is to come."""
        size = len(message) if num_bytes is None else num_bytes
        is_whole = size == len(message)
        payload = struct.pack(">BI", 0, size) + message
        self.send(DATA, END_STREAM if is_whole else 0, stream, payload)

    def call(self, method: str, message: bytes = b"") -> int:
        """A call with one request."""
        stream = self.headers(method)
        self.message(stream, message)
        return stream

    def receive(self) -> tuple[int, int, int, bytes]:
        """The next frame's kind, flags, stream and payload; EOFError at the connection's end."""
        head = self._exactly(9)
        size = int.from_bytes(head[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", head[3:])
        payload = self._exactly(size)
        is_answered = kind == SETTINGS or (kind == PING and self._answers_pings)
        if is_answered and not flags & ACK:
            self.send(kind, ACK, 0, payload if kind == PING else b"")
        return kind, flags, stream, payload

    def until(self, kind: int, stream: int) -> bytes:
        """The payload of the next frame of this kind on the stream."""
        while True:
            got, _, on, payload = self.receive()
            if (got, on) == (kind, stream):
                return payload

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data
