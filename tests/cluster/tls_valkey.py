"""`python -m tests.cluster.tls_valkey SERVER CONFIG`: a Valkey without TLS, and TLS before it.

The settings are those of the chart. Valkey itself listens on a socket in its data folder, and what
comes to the TLS port with the certificate of the settings is passed on to it.
"""

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path

from headrace.service.children import tied_to_us
from tests.cluster.network import relay

_SOCKET = Path("/data/valkey.sock")
_PLAIN = Path("/data/plain.conf")


async def serve(server: str, plain: Path, tls: Mapping[str, str]) -> None:
    """Until SIGTERM; the end of Valkey ends it, too. plain: settings without those of TLS."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls["tls-cert-file"], tls["tls-key-file"])

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay(reader, writer, await asyncio.open_unix_connection(_SOCKET))

    valkey = await asyncio.create_subprocess_exec(*tied_to_us([server, str(plain)]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, valkey.terminate)
    port = int(tls["tls-port"])
    async with await asyncio.start_server(take, os.environ["POD_IP"], port, ssl=context):
        await valkey.wait()


def main(server: str, file: Path) -> None:
    """Split the settings and serve."""
    lines = [line.split(" ", 1) for line in file.read_text().splitlines() if line]
    tls = {name: value for name, value in lines if name.startswith("tls-")}
    kept = (" ".join(line) for line in lines if line[0] not in tls)
    _PLAIN.write_text("\n".join((*kept, f"unixsocket {_SOCKET}\n")))
    asyncio.run(serve(server, _PLAIN, tls))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
